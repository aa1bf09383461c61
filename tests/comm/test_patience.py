"""A wait that takes long asks around; one that ends in time, or fails, does not."""

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from refimpl.comm.agree import Agreed, Transfer
from refimpl.comm.behind import Behind
from refimpl.comm.patience import Patience
from refimpl.comm.throttled import Crossing


class Handle:
    """As torch's: `needs` waits with a limit time out before it is done; then `error`, if any."""

    def __init__(self, needs: int, error: str = "") -> None:
        self.needs, self.error, self.limits = needs, error, list[float | None]()

    def is_completed(self) -> bool:
        return self.needs <= 0

    def wait(self, limit: timedelta | None = None) -> None:
        self.limits.append(None if limit is None else limit.total_seconds())
        if limit is not None and self.needs > 0:
            self.needs -= 1
            raise RuntimeError("Operation timed out!" if self.needs or not self.error else self.error)
        if self.error:
            raise RuntimeError(self.error)


def nothing(_: float) -> None:
    """Who is told that a wait is long."""


@pytest.mark.parametrize("needs", [0, 1, 3])
def test_whoever_knows_is_asked_as_long_as_it_takes(needs: int) -> None:
    patience, asked = Patience(stall=0.5, again=0.1), list[int]()
    patience.ask.append(asked.append)
    handle = Handle(needs)
    patience.wait(handle, 7, nothing)
    # A handle that is done just when its limit is over is waited for again, and nobody is asked.
    assert asked == [7] * max(0, needs - 1)
    assert handle.limits[:2] == [0.5, *([0.1] if needs > 1 else [None])]


@pytest.mark.parametrize(("needs", "tells"), [(0, 0), (1, 0), (5, 1)])
def test_with_nobody_to_ask_it_is_one_wait_and_a_late_one_is_told_once(needs: int, tells: int) -> None:
    handle, told = Handle(needs), list[float]()
    Patience(again=0, late=0).wait(handle, 1, told.append)
    assert len(told) == tells
    assert len(handle.limits) == max(1, needs) + 1


@pytest.mark.parametrize(("unheard", "tells"), [(0, 1), (1e9, 0)])
def test_who_hears_nothing_from_the_others_for_long_says_so_once(unheard: float, tells: int) -> None:
    looked, told = list[bool](), list[float]()

    def are_heard() -> bool:
        looked.append(len(looked) == 4)
        return looked[-1]

    Patience(unheard=unheard).hear_all(are_heard, told.append)
    assert len(told) == tells
    assert len(looked) == 5


@pytest.mark.parametrize("by", ["a thread", "a cable"])
def test_what_waits_for_a_transfer_is_not_done_before_it(by: str) -> None:
    """Else one that never ends would be waited for without a limit, and nobody asked."""
    handle, behind = Handle(1), Behind()
    cables: Any = SimpleNamespace(cables=SimpleNamespace(due=lambda _: 0))
    waits = behind.begin(lambda: [handle]) if by == "a thread" else Crossing(cables, [handle], 0, [])
    behind.call(lambda: None)  # by then the thread has done what it was given before
    assert not waits.is_completed()
    handle.needs = 0
    assert waits.is_completed()


def test_a_failure_is_not_taken_for_a_limit() -> None:
    patience = Patience()
    patience.ask.append(lambda _: None)
    with pytest.raises(RuntimeError, match="connection closed"):
        patience.wait(Handle(2, "connection closed"), 1, nothing)


def test_who_is_asked_may_raise() -> None:
    def refuse(number: int) -> None:
        raise ValueError(f"never mind {number}")

    patience = Patience(stall=0, again=0)
    patience.ask.append(refuse)
    with pytest.raises(ValueError, match="never mind 3"):
        patience.wait(Handle(5), 3, nothing)
    patience.begun = 9
    with pytest.raises(ValueError, match="never mind 9"):
        patience.poll(lambda: False)


def test_a_device_is_polled_until_it_is_done() -> None:
    patience, asked = Patience(stall=0, again=0), list[int]()
    patience.ask.append(asked.append)
    patience.poll(lambda: len(asked) == 3)
    assert len(asked) == 3


def test_who_polls_a_device_for_long_leaves_pythons_lock_to_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's `query` of a GPU's event keeps it: an update beside the next step would crawl.

    At first it looks without a pause, or a message that is timed would take as long as the pause.
    """
    clock, looks, slept = iter([0.0, 2e-5, 1.5e-3, 0.003, 0.1, 5.0]), iter([False] * 5 + [True]), list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(time, "sleep", slept.append)
    Patience(stall=10).poll(lambda: next(looks))
    assert slept == pytest.approx([5e-5, 2e-4, 1e-3])


def test_torchs_own_message_is_waited_for_once_and_without_a_limit() -> None:
    """Its pair of ranks is closed when a limit is over."""
    handle: Any = Handle(0)
    Transfer(handle, Agreed(None, None, Patience(late=0), 0, "recv", ""), None).wait()
    assert handle.limits == [None]


def test_after_ranks_have_parted_nothing_begins_and_nothing_is_awaited() -> None:
    patience = Patience()
    patience.begin()
    patience.part(RuntimeError("the ranks have parted"))
    with pytest.raises(RuntimeError, match="have parted"):
        patience.begin()
    with pytest.raises(RuntimeError, match="have parted"):
        patience.wait(Handle(0), 1, nothing)
