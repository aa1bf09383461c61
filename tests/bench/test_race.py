"""Turns alternate, warm-up is left out, the slowest rank counts, and the huge-page world really has huge pages."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from refimpl import launch
from refimpl.bench.race import HUGE_PAGES, Turns, both_worlds, huge_pages, race, slowest
from refimpl.comm.group import Group

PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_contestants_alternate() -> None:
    order: list[str] = []

    def contestant(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    times = race(Group(None), {"a": contestant("a"), "b": contestant("b")}, Turns(turns=2, steps=3, warm_up=1))
    assert order == ["a"] * 3 + ["b"] * 3 + ["a"] * 3 + ["b"] * 3 + ["a"] * 3 + ["b"] * 3
    assert {name: len(ms) for name, ms in times.items()} == {"a": 6, "b": 6}


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
    """Growth of this process's huge pages by a tensor of 64 MB."""

    def now() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))

    before = now()
    kept = torch.ones(16 << 20)
    return now() - before + 0 * len(kept)


@pytest.mark.skipif(not PAGES.exists() or "[madvise]" not in PAGES.read_text(), reason="huge pages are not on request")
def test_one_world_has_huge_pages_and_the_other_has_not() -> None:
    worlds = dict(both_worlds(huge_kilobytes, ranks=2))
    assert worlds["plain"] == [0, 0]
    assert all(kilobytes > 32_000 for kilobytes in worlds["huge"])


def test_rounds_alternate_between_worlds() -> None:
    seen = [pages for pages, _ in both_worlds(os.getpid, ranks=1, rounds=2)]
    assert seen == ["plain", "huge"] * 2


def test_launch_passes_the_variable_on() -> None:
    with huge_pages(True):
        assert launch.run(lambda: os.environ[HUGE_PAGES], ranks=2) == ["1", "1"]
