"""A race: contestants that do the same work take turns on the same ranks, so that noise falls on all of them.

A step's time is that of its slowest rank; a contestant's is the median of its steps after the warm-up turns; what
counts is the ratio to the best peer of the same heat. Each race is run in two worlds, because transparent huge pages
(`THP_MEM_ALLOC_ENABLE=1`, read once by a process) make large fresh buffers cheaper, and some peers allocate many.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any

from refimpl import launch
from refimpl.comm.group import Group
from refimpl.measure.clock import Clock
from refimpl.ranks.environment import variables

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
AHEAD = 20e-3  # seconds from a rank's last word to the instant at which all begin: long enough to hear of it

Times = dict[str, list[float]]  # contestant -> milliseconds of each timed step
Row = Callable[[Group, Callable[[], object], int], list[float]]  # how a contestant takes so many steps in a row


@dataclass(frozen=True)
class Turns:
    """`turns` times round, each contestant takes `steps` steps; `warm_up` rounds more go first, untimed."""

    turns: int = 4
    steps: int = 4
    warm_up: int = 1


def in_a_row(group: Group, step: Callable[[], object], steps: int) -> list[float]:
    """Milliseconds of each of so many steps, one after the other; the first begins behind a barrier."""
    clock = Clock(group.device)
    group.barrier()
    for _ in range(steps):
        with clock.time():
            step()
    return clock.ms["step"]


def race(group: Group, contestants: Mapping[str, Callable[[], object]], turns: Turns, row: Row = in_a_row) -> Times:
    """Let the contestants take turns; milliseconds of every timed step of each, on this rank. `row`: one turn."""
    times = Times()
    for turn in range(turns.warm_up + turns.turns):
        for name, step in contestants.items():
            ms = row(group, step, turns.steps)
            if turn >= turns.warm_up:
                times.setdefault(name, []).extend(ms)
    return times


def from_one_instant(group: Group, step: Callable[[], object], steps: int) -> list[float]:
    """As `in_a_row`, for ranks of one machine: milliseconds from an instant at which all ranks begin, at every step.

    In a row of steps one hides the latency at the end of the one before; behind a barrier whoever leaves it first has
    a head start, of up to a millisecond where ranks are more than cores. An instant that a rank has heard of too late
    is told with the next one: that step does not count, and is taken again, from an instant twice as far ahead.
    """
    ms, ahead, late, last = list[float](), AHEAD, False, list[float]()
    while True:
        told = group.all_gather_object((time.monotonic(), late))
        if any(was_late for _, was_late in told):
            ahead *= 2
        else:
            ms += last
        if len(ms) == steps:
            return ms
        begin = max(now for now, _ in told) + ahead
        late = time.monotonic() > begin
        time.sleep(max(0.0, begin - time.monotonic()))
        step()
        group.settle()
        last = [1e3 * (time.monotonic() - begin)]


def slowest(ranks: list[Times]) -> Times:
    """Times of each rank -> of the slowest rank at each step."""
    return {name: [max(step) for step in zip(*(r[name] for r in ranks), strict=True)] for name in ranks[0]}


def by_pages(worlds: Iterable[tuple[str, list[Times]]]) -> dict[str, Times]:
    """(pages, times of each rank) of every world -> kind of pages -> of the slowest rank, round after round."""
    times: dict[str, Times] = {}
    for pages, ranks in worlds:
        for name, steps in slowest(ranks).items():
            times.setdefault(pages, {}).setdefault(name, []).extend(steps)
    return times


def medians(times: Mapping[str, Times]) -> dict[str, dict[str, float]]:
    """Kind of pages -> contestant -> its median step."""
    return {pages: {name: median(steps) for name, steps in world.items()} for pages, world in times.items()}


def huge_pages(on: bool) -> AbstractContextManager[None]:
    """Worlds started inside allocate large tensors on huge pages, or do not."""
    return variables({HUGE_PAGES: str(int(on))})


def both_worlds(fn: Callable[..., Any], *args: object, ranks: int, rounds: int = 1) -> Iterator[tuple[str, list[Any]]]:
    """fn(*args) on a fresh world of "plain" and on one of "huge" pages, `rounds` times: (pages, results by rank)."""
    for _ in range(rounds):
        for pages in ("plain", "huge"):
            with huge_pages(pages == "huge"):
                yield pages, launch.run(fn, *args, ranks=ranks, timeout=600)
