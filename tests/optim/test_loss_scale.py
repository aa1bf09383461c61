"""The dynamic scale against DeepSpeed's rule, written in DeepSpeed's terms: iteration numbers instead of a counter."""

import itertools

import pytest

from refimpl.optim.loss_scale import DynamicLossScaler, LossScaler


def by_iteration(
    overflows: tuple[bool, ...], scale: float, window: int, hysteresis: int, consecutive: bool, minimum: float
) -> list[float | str]:
    """The scale after each step; "raise" ends the list. Iteration i is compared with that of the last overflow."""
    scales: list[float | str] = []
    last, endured = -1, 0
    for i, overflow in enumerate(overflows):
        if overflow:
            if endured == hysteresis - 1:
                if scale == minimum:
                    return [*scales, "raise"]
                scale = max(scale / 2, minimum)
            else:
                endured += 1
            last = i
        else:
            if consecutive:
                endured = 0
            since = i - last - 1
            if since > 0 and since % window == 0:
                endured = 0
                scale *= 2
        scales.append(scale)
    return scales


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_every_history_of_eight_steps(window: int, hysteresis: int, consecutive: bool) -> None:
    for history in itertools.product([False, True], repeat=8):
        scaler = DynamicLossScaler(8.0, window, hysteresis, consecutive, min_scale=2.0)
        scales: list[float | str] = []
        for overflow in history:
            try:
                scaler.update(overflow)
            except OverflowError:
                scales.append("raise")
                break
            scales.append(scaler.scale)
        assert scales == by_iteration(history, 8.0, window, hysteresis, consecutive, 2.0)


def test_the_error_says_what_to_do() -> None:
    scaler = DynamicLossScaler(1.0, hysteresis=1, min_scale=1.0)
    with pytest.raises(OverflowError, match=r"minimum 1.*learning rate"):
        scaler.update(overflow=True)


def test_a_scale_may_stay_at_its_minimum() -> None:
    """As in DeepSpeed's stage 0, which has no other end than the caller's."""
    scaler = DynamicLossScaler(4.0, hysteresis=1, min_scale=1.0, raise_at_min=False)
    seen = []
    for overflow in (True, True, True, True, False):
        scaler.update(overflow)
        seen.append((scaler.scale, scaler.can_shrink))
    assert seen == [(2.0, True), *[(1.0, False)] * 4]
    assert not LossScaler(4.0).can_shrink


@pytest.mark.parametrize("cut", range(1, 12))
def test_resuming_changes_nothing(cut: int) -> None:
    history = [False, False, True, True, False, False, False, True, False, False, False, False]
    whole = DynamicLossScaler(1024.0, window=2, hysteresis=2)
    first, second = DynamicLossScaler(1024.0, window=2, hysteresis=2), DynamicLossScaler(2.0, window=2, hysteresis=2)
    for overflow in history[:cut]:
        whole.update(overflow)
        first.update(overflow)
    second.load_state_dict(first.state_dict())
    for overflow in history[cut:]:
        whole.update(overflow)
        second.update(overflow)
        assert second.scale == whole.scale


def test_a_static_scale_stays() -> None:
    scaler = LossScaler(128)
    for overflow in (True, False, True):
        scaler.update(overflow)
    assert scaler.scale == 128.0
    other = LossScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.scale == 128.0


@pytest.mark.parametrize("scale", [0, -1, float("inf"), float("nan")])
def test_a_scale_is_positive_and_finite(scale: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        LossScaler(scale)
