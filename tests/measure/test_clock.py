"""The clock: which intervals count, checked against a stubbed time source."""

from types import SimpleNamespace

import pytest
import torch

from refimpl.measure import clock as clock_module
from refimpl.measure.clock import Clock


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Readings that the time source gives, front first; tests fill it."""
    readings: list[float] = []
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: readings.pop(0)))
    return readings


def steps(clock: Clock, seconds: list[float], lengths_ms: list[float], name: str = "step") -> None:
    for ms in lengths_ms:
        seconds += [10.0, 10.0 + ms / 1e3]
        with clock.time(name):
            pass


def test_median_leaves_the_warm_up_out_and_ignores_one_slow_step(seconds: list[float]) -> None:
    clock = Clock(warmup=2)
    steps(clock, seconds, [900, 700, 3, 5, 400, 4, 6])
    assert clock.median() == pytest.approx(5)


def test_every_name_has_its_own_warm_up(seconds: list[float]) -> None:
    clock = Clock(warmup=1)
    steps(clock, seconds, [100, 1, 2, 3], "forward")
    steps(clock, seconds, [200, 20], "backward")
    assert clock.median("forward") == pytest.approx(2)
    assert clock.median("backward") == pytest.approx(20)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_no_interval_after_the_warm_up_is_an_error_that_says_so(seconds: list[float], count: int) -> None:
    clock = Clock(warmup=2)
    steps(clock, seconds, [1.0] * count)
    with pytest.raises(ValueError, match=rf"'step' has {count} intervals, and the first 2 are warm-up"):
        clock.median("step")


def test_drain_sums_each_name_and_starts_anew(seconds: list[float]) -> None:
    clock = Clock()
    steps(clock, seconds, [1, 2], "forward")
    steps(clock, seconds, [10], "step")
    assert clock.drain() == pytest.approx({"forward": 3, "step": 10})
    assert clock.drain() == {}


def test_names_nest_and_the_outer_interval_holds_the_inner(seconds: list[float]) -> None:
    seconds += [0.0, 1.0, 2.0, 5.0]
    clock = Clock()
    with clock.time("step"), clock.time("forward"):
        pass
    assert clock.ms == {"forward": [1000.0], "step": [5000.0]}


def test_a_block_that_raises_is_not_recorded(seconds: list[float]) -> None:
    seconds += [0.0, 1.0]
    clock = Clock()
    with pytest.raises(ZeroDivisionError), clock.time():
        raise ZeroDivisionError
    assert clock.ms == {}


def test_cuda_is_synchronised_at_both_ends_and_the_cpu_never(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(str(device)))
    with Clock("cpu").time():
        calls.append("work")
    assert calls == ["work"]
    with Clock("cuda:1").time():
        calls.append("kernel")
    assert calls == ["work", "cuda:1", "kernel", "cuda:1"]
