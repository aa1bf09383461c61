"""Turns alternate, warm-up is left out, the slowest rank counts, and the huge-page world really has huge pages."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds

from refimpl import launch
from refimpl.bench.race import AHEAD, HUGE_PAGES, Turns, both_worlds, from_one_instant, huge_pages, race, slowest
from refimpl.comm.group import Group

PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_contestants_alternate() -> None:
    order: list[str] = []

    def contestant(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    times = race(Group(None), {"a": contestant("a"), "b": contestant("b")}, Turns(turns=2, steps=3, warm_up=1))
    assert order == ["a"] * 3 + ["b"] * 3 + ["a"] * 3 + ["b"] * 3 + ["a"] * 3 + ["b"] * 3
    assert {name: len(ms) for name, ms in times.items()} == {"a": 6, "b": 6}


class Absent(Group):
    """Its last rank hears what all have said only when the instant is over, twice."""

    times = 2

    def all_gather_object(self, obj: Any) -> list[Any]:
        said = super().all_gather_object(obj)
        if self.times and self.rank == self.size - 1:
            self.times -= 1
            while time.monotonic() < max(now for now, _ in said) + 3 * AHEAD:
                pass
        return said


def taken(kind: type[Group]) -> tuple[int, int]:
    """Steps taken, and steps that count."""
    steps: list[int] = []
    times = race(kind(dist.group.WORLD), {"a": lambda: steps.append(0)}, Turns(1, 2, warm_up=0), from_one_instant)
    return len(steps), len(times["a"])


def test_a_step_that_a_rank_began_late_is_taken_again_by_all() -> None:
    together, *others = worlds.run(taken, Absent, ranks=3)
    assert others == [together] * 2
    assert together[0] >= 4
    assert together[1] == 2


def test_slowest_rank_of_each_step() -> None:
    assert slowest([{"a": [1.0, 5.0]}, {"a": [2.0, 4.0]}]) == {"a": [2.0, 5.0]}


def test_ranks_that_took_different_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        slowest([{"a": [1.0, 5.0]}, {"a": [2.0]}])


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    monkeypatch.delenv(HUGE_PAGES, raising=False)
    if before is not None:
        monkeypatch.setenv(HUGE_PAGES, before)
    with huge_pages(True):
        assert os.environ[HUGE_PAGES] == "1"
    assert os.environ.get(HUGE_PAGES) == before


def huge_kilobytes() -> int:
    """How much of a tensor of 64 MB is asked for in huge pages; the kernel gives as many as it has together."""

    def now() -> int:
        places = re.findall(r"^Size: +(\d+) kB$.*?^VmFlags:(.*?)$", Path("/proc/self/smaps").read_text(), re.M | re.S)
        return sum(int(size) for size, flags in places if "hg" in flags.split())

    before = now()
    kept = torch.ones(16 << 20)
    return now() - before + 0 * len(kept)


@pytest.mark.skipif(not PAGES.exists() or "[madvise]" not in PAGES.read_text(), reason="huge pages are not on request")
def test_one_world_has_huge_pages_and_the_other_has_not() -> None:
    pages = dict(both_worlds(huge_kilobytes, ranks=2))
    assert pages["plain"] == [0, 0]
    assert all(kilobytes >= 64 << 10 for kilobytes in pages["huge"])


def test_rounds_alternate_between_worlds() -> None:
    seen = [pages for pages, _ in both_worlds(os.getpid, ranks=1, rounds=2)]
    assert seen == ["plain", "huge"] * 2


def test_launch_passes_the_variable_on() -> None:
    with huge_pages(True):
        assert launch.run(lambda: os.environ[HUGE_PAGES], ranks=2) == ["1", "1"]
