"""Schedules against closed formulas, written here from the definitions, and at their edges."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import refimpl
from refimpl.optim.schedule import LRRangeTest, OneCycle, Schedule, WarmupCosineLR, WarmupDecayLR, WarmupLR

Make = Callable[[torch.optim.Optimizer], Schedule]


def adam(*rates: float) -> torch.optim.Optimizer:
    """An Adam with one parameter group for each rate."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates or (0.1,)]
    return torch.optim.Adam(groups)


def rates(schedule: Schedule, steps: int) -> list[float]:
    """The first group's rate in the optimizer: at construction, then after each step."""
    seen = [schedule.optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        schedule.step()
        seen.append(schedule.optimizer.param_groups[0]["lr"])
    return seen


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup(kind: str) -> None:
    low, high, steps = 0.01, 0.2, 5
    seen = rates(WarmupLR(adam(), low, high, steps, kind), 9)
    part = [math.log(k + 1, steps) if kind == "log" else k / steps for k in range(steps)]
    assert seen == pytest.approx([low, *(low + (high - low) * x for x in part), *[high] * 4])


def test_warmup_is_log_by_default_and_ends_at_each_groups_own_rate() -> None:
    schedule = WarmupLR(adam(0.4, 0.8), warmup_num_steps=3)
    assert schedule.max_lrs == [0.4, 0.8]
    assert rates(schedule, 4) == pytest.approx([0, 0, 0.4 * math.log(2, 3), 0.4, 0.4])
    assert schedule.get_last_lr() == pytest.approx([0.4, 0.8])
    decaying = WarmupDecayLR(adam(0.4, 0.8), 10, warmup_max_lr=None, warmup_num_steps=3)
    decaying.step(3)
    assert decaying.get_last_lr() == pytest.approx([0.4, 0.8])


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_decay(kind: str) -> None:
    low, high, warmup, total = 0.02, 0.1, 4, 10
    seen = rates(WarmupDecayLR(adam(), total, low, high, warmup, kind), 14)[1:]
    for k, rate in enumerate(seen):
        if k < warmup:
            part = math.log(k + 1, warmup) if kind == "log" else k / warmup
        else:
            part = max(0, (total - k) / (total - warmup))
        assert rate == pytest.approx(low + (high - low) * part)
    assert seen[warmup] == pytest.approx(high)  # the peak
    assert seen[total:] == [low] * 4  # and never below the minimum


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_cosine(kind: str) -> None:
    start, floor, warmup, total, own = 0.1, 0.05, 4, 12, 0.3
    schedule = WarmupCosineLR(adam(own), total, start, warmup, floor, kind)
    seen = rates(schedule, 16)
    assert seen[0] == 0.0
    for k, rate in enumerate(seen[1:]):
        if k < warmup:
            ratio = start + (1 - start) * (math.log(k + 1, warmup) if kind == "log" else k / warmup)
        elif k < total:
            ratio = floor + (1 - floor) * math.cos(math.pi * (k - warmup + 1) / (total - warmup) / 2) ** 2
        else:
            ratio = floor
        assert rate == pytest.approx(own * ratio)


def test_range_test() -> None:
    continuous = rates(LRRangeTest(adam(), 0.1, 4, 0.5), 9)
    assert continuous == pytest.approx([0.1 * (1 + 0.5 * n / 4) for n in range(10)])
    stairs = rates(LRRangeTest(adam(), 0.1, 4, 0.5, lr_range_test_staircase=True), 9)
    assert stairs == pytest.approx([0.1] * 4 + [0.15] * 4 + [0.2] * 2)


def test_one_cycle_goes_up_down_and_decays() -> None:
    optimizer = adam()
    options: dict[str, Any] = {"cycle_first_step_size": 4, "cycle_second_step_size": 2, "decay_step_size": 3}
    schedule = OneCycle(optimizer, 0.1, 0.5, 0.6, **options, cycle_min_mom=0.8, cycle_max_mom=0.9, decay_mom_rate=0.03)
    seen, momenta = [optimizer.param_groups[0]["lr"]], [optimizer.param_groups[0]["betas"]]
    for _ in range(10):
        schedule.step()
        seen.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["betas"])
    cycle = [0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1]
    decay = [0.1 / (1 + 0.6 * n / 3) for n in range(1, 5)]
    assert seen == pytest.approx(cycle + decay)
    mirrored = [0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9]  # k = -1 starts at the minimum
    assert [beta1 for beta1, _ in momenta] == pytest.approx(mirrored + [0.9 * (1 + 0.03 * n / 3) for n in range(1, 5)])
    assert {beta2 for _, beta2 in momenta} == {0.99}


def test_one_cycle_without_decay_stays_at_its_ends() -> None:
    optimizer = adam()
    seen = rates(OneCycle(optimizer, 0.1, 0.5, cycle_first_step_size=2, decay_lr_rate=1.0), 8)
    assert seen == pytest.approx([0.1, 0.3, 0.5, 0.3, 0.1, 0.1, 0.1, 0.1, 0.1])
    assert optimizer.param_groups[0]["betas"][0] == 0.9


def test_one_cycle_with_a_rate_and_a_momentum_for_each_group() -> None:
    optimizer = adam(0.1, 0.2)
    schedule = OneCycle(
        optimizer,
        [0.01, 0.02],
        [0.1, 0.4],
        cycle_first_step_size=4,
        cycle_min_mom=[0.7, 0.8],
        cycle_max_mom=[0.9, 0.95],
    )
    seen = []
    for k in (-1, 3, 7, 20):
        schedule.step(k)
        seen.append([(group["lr"], group["betas"][0]) for group in optimizer.param_groups])
    low, high = [(0.01, 0.9), (0.02, 0.95)], [(0.1, 0.7), (0.4, 0.8)]
    start = [(0.01, 0.7), (0.02, 0.8)]  # construction writes the smallest momentum, as DeepSpeed does
    for found, expected in zip(seen, [start, high, low, low], strict=True):
        assert [pytest.approx(pair) for pair in expected] == found
    for name in ("cycle_min_lr", "cycle_max_lr", "cycle_min_mom", "cycle_max_mom"):
        options = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, name: [0.1, 0.2, 0.3]}
        with pytest.raises(ValueError, match=f"{name} has 3 values for 2 parameter groups"):
            OneCycle(adam(0.1, 0.2), **options)


def test_one_cycle_gives_its_momentum_as_betas() -> None:
    schedule = OneCycle(adam(), 0.1, 0.5, cycle_first_step_size=4, cycle_min_mom=0.8, cycle_max_mom=0.9)
    assert schedule.get_mom() == [(0.9, 0.99)]  # the formula's, before the first step too
    schedule.step(3)
    assert schedule.get_mom() == [(0.8, 0.99)]


def test_one_cycle_without_a_way_down() -> None:
    schedule = OneCycle(adam(), 0.1, 0.5, cycle_first_step_size=4, cycle_second_step_size=0)
    assert schedule.step_ratio == 1
    assert rates(schedule, 6) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.1, 0.1, 0.1])


@pytest.mark.parametrize(("first", "second"), [(0, None), (-1, None), (0, 5), (5, -1), (2.5, None), (math.inf, 1)])
def test_one_cycle_of_no_length(first: float, second: int | None) -> None:
    sizes: dict[str, Any] = {"cycle_first_step_size": first, "cycle_second_step_size": second}
    with pytest.raises(ValueError, match=r"cycle_(first|second)_step_size must be a whole number of at least"):
        OneCycle(adam(), 0.1, 0.5, **sizes)


@pytest.mark.parametrize("size", [0, -5, 2.5])
def test_a_range_test_of_no_length(size: int) -> None:
    with pytest.raises(ValueError, match="lr_range_test_step_size must be a whole number of at least 1"):
        LRRangeTest(adam(), lr_range_test_step_size=size)


def test_one_cycle_in_stairs() -> None:
    options = {"cycle_first_step_size": 4, "cycle_first_stair_count": 2, "cycle_second_stair_count": 4}
    seen = rates(OneCycle(adam(), 0.0, 1.0, **options), 8)
    assert seen == pytest.approx([0, 0, 0.5, 0.5, 1, 0.75, 0.5, 0.25, 0])
    uneven = OneCycle(adam(), 0.0, 1.0, cycle_first_step_size=3, cycle_second_step_size=7, cycle_first_stair_count=3)
    assert rates(uneven, 3) == pytest.approx([0, 1 / 3, 2 / 3, 1])  # no stair lost to rounding at the peak


def test_one_cycle_momentum_of_sgd_and_of_none() -> None:
    weight, other = [torch.nn.Parameter(torch.ones(1))], [torch.nn.Parameter(torch.ones(1))]
    sgd = torch.optim.SGD([{"params": weight, "momentum": 0.5}, {"params": other}], lr=0.1)
    schedule = OneCycle(sgd, 0.1, 0.5, cycle_first_step_size=2)
    schedule.step()
    assert [group["momentum"] for group in sgd.param_groups] == pytest.approx([0.85, 0])  # of the group that has one
    with pytest.warns(UserWarning, match="SGD has no momentum to cycle"):
        plain = OneCycle(torch.optim.SGD(weight, lr=0.1), 0.1, 0.5, cycle_first_step_size=2)
    plain.step()
    assert plain.get_mom() is None
    still = adam()
    OneCycle(still, 0.1, 0.5, cycle_momentum=False).step()
    assert still.param_groups[0]["betas"] == (0.9, 0.999)


SCHEDULES: list[Make] = [
    lambda o: WarmupLR(o, 0.0, 0.1, 3),
    lambda o: WarmupDecayLR(o, 8, 0.0, 0.1, 3),
    lambda o: WarmupCosineLR(o, 8, warmup_num_steps=3),
    lambda o: LRRangeTest(o, 0.1, 2),
    lambda o: OneCycle(o, 0.1, 0.5, 1.0, cycle_first_step_size=3, decay_step_size=2),
]


@pytest.mark.parametrize("make", SCHEDULES)
def test_resuming_at_any_step_changes_nothing(make: Make) -> None:
    whole = make(adam())
    for _ in range(12):
        resumed = make(adam())
        resumed.load_state_dict(whole.state_dict())
        assert resumed.get_last_lr() == whole.get_last_lr()
        whole.step()
        resumed.step()
        assert resumed.get_last_lr() == whole.get_last_lr() == whole.get_lr()
        assert resumed.optimizer.param_groups[0]["betas"] == whole.optimizer.param_groups[0]["betas"]


@pytest.mark.parametrize("make", SCHEDULES)
def test_stepping_to_a_number_and_starting_there(make: Make) -> None:
    walked, jumped = make(adam()), make(adam())
    for _ in range(6):
        walked.step()
    jumped.step(5)
    assert jumped.get_last_lr() == walked.get_last_lr()
    assert jumped.state_dict() == {"last_batch_iteration": 5}


def test_a_rate_for_each_group() -> None:
    optimizer = adam(1.0, 2.0)
    WarmupLR(optimizer, [0.1, 0.2], [0.5, 0.6], 2).step(2)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.5, 0.6])
    LRRangeTest(optimizer, [0.1, 0.3], 1)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.1, 0.3])
    with pytest.raises(ValueError, match="warmup_min_lr has 3 values for 2 parameter groups"):
        WarmupLR(optimizer, [0.1, 0.2, 0.3])


def test_another_group_needs_another_schedule() -> None:
    optimizer = adam(1.0)
    schedule = WarmupLR(optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="WarmupLR was made for 1 parameter groups, the optimizer has 2 now"):
        schedule.step()


def test_cosine_scales_each_groups_own_rate() -> None:
    schedule = WarmupCosineLR(adam(1.0, 2.0), 10, warmup_num_steps=2, warmup_type="linear")
    schedule.step(1)
    assert schedule.get_last_lr() == pytest.approx([0.5, 1.0])


def test_a_rate_kept_in_a_tensor_stays_in_it() -> None:
    optimizer = adam()
    rate = torch.tensor(0.1)
    optimizer.param_groups[0]["lr"] = rate
    WarmupLR(optimizer, 0.0, 0.5, 2).step(2)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


@pytest.mark.parametrize(
    "bad",
    [{"warmup_num_steps": -5}, {"warmup_num_steps": 2.5}, {"warmup_num_steps": None}, {"warmup_type": "cubic"}],
)
def test_bad_arguments(bad: dict[str, Any]) -> None:
    for make in (WarmupLR, lambda o, **k: WarmupDecayLR(o, 9999, **k), lambda o, **k: WarmupCosineLR(o, 9999, **k)):
        with pytest.raises(ValueError, match="warmup_"):
            make(adam(), **bad)


@pytest.mark.parametrize("total", [0, -1, 2.5, None])
def test_bad_totals(total: Any) -> None:
    for make in (WarmupDecayLR, WarmupCosineLR):
        with pytest.raises(ValueError, match="total_num_steps must be a whole number of at least 1"):
            make(adam(), total)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("number", range(5))
def test_every_schedule_writes_into_a_rate_kept_in_a_tensor(number: int, shape: tuple[int, ...]) -> None:
    plain, kept = adam(), adam()
    rate = torch.full(shape, 0.1, dtype=torch.float64)
    kept.param_groups[0]["lr"] = rate
    for optimizer in (plain, kept):
        SCHEDULES[number](optimizer).step(2)
    assert kept.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(plain.param_groups[0]["lr"])


@pytest.mark.parametrize("steps", [0, 1])  # 0 is what transformers' Trainer puts for "auto" unless it is told
def test_a_warmup_of_no_or_one_step_counts_as_two(steps: int) -> None:
    assert rates(WarmupLR(adam(), 0.0, 1.0, steps), 3) == pytest.approx([0, 0, 1, 1])
    with pytest.warns(UserWarning, match="less than warmup_num_steps"):
        WarmupDecayLR(adam(), 3, warmup_num_steps=5)


def test_of_muons_two_kinds_of_groups_each_has_its_own_momentum_cycled() -> None:
    model = torch.nn.Linear(2, 2)
    engine = refimpl.initialize(
        model=model,
        config={
            "train_batch_size": 1,
            "optimizer": {"type": "Muon", "params": {"lr": 0.1}},
            "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5}},
        },
    )[0]
    assert engine.get_mom() == [0.8, (0.8, 0.99)]
    assert engine.optimizer is not None
    assert [g["betas"] for g in engine.optimizer.param_groups] == [(0.9, 0.95), (0.8, 0.99)]
