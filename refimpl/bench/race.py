"""A race: contestants that do the same work take turns on the same ranks, so that noise falls on all of them.

A step's time is that of its slowest rank; a contestant's is the median of its steps after the warm-up turns; what
counts is the ratio to the best peer of the same heat. Each race is run in two worlds, because transparent huge pages
(`THP_MEM_ALLOC_ENABLE=1`, read once by a process) make large fresh buffers cheaper, and some peers allocate many.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from refimpl import launch
from refimpl.comm.group import Group
from refimpl.measure.clock import Clock

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
AHEAD = 20e-3  # seconds from a rank's last word to the instant at which all begin: long enough to hear of it

Times = dict[str, list[float]]  # contestant -> milliseconds of each timed step


@dataclass(frozen=True)
class Turns:
    """`turns` times round, each contestant takes `steps` steps; `warm_up` rounds more go first, untimed."""

    turns: int = 4
    steps: int = 4
    warm_up: int = 1


def race(group: Group, contestants: Mapping[str, Callable[[], object]], turns: Turns) -> Times:
    """Let the contestants take turns; milliseconds of every timed step of each, on this rank."""
    clock = Clock(group.device, warmup=turns.warm_up * turns.steps)
    for _ in range(turns.warm_up + turns.turns):
        for name, step in contestants.items():
            group.barrier()
            for _ in range(turns.steps):
                with clock.time(name):
                    step()
    return {name: times[clock.warmup :] for name, times in clock.ms.items()}


def from_one_instant(group: Group, contestants: Mapping[str, Callable[[], object]], turns: Turns) -> Times:
    """As `race`, for ranks of one machine: milliseconds from an instant at which all ranks begin, at every step.

    In a row of steps one hides the latency at the end of the one before; behind a barrier whoever leaves it first has
    a head start, of up to a millisecond where ranks are more than cores.
    """
    found = Times()
    for turn in range(turns.warm_up + turns.turns):
        for name, step in contestants.items():
            for _ in range(turns.steps):
                begin = max(group.all_gather_object(time.monotonic())) + AHEAD
                time.sleep(max(0.0, begin - time.monotonic()))
                step()
                group.settle()
                if turn >= turns.warm_up:
                    found.setdefault(name, []).append(1e3 * (time.monotonic() - begin))
    return found


def slowest(ranks: list[Times]) -> Times:
    """Times of each rank -> of the slowest rank at each step."""
    return {name: [max(step) for step in zip(*(r[name] for r in ranks), strict=True)] for name in ranks[0]}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Worlds started inside find these variables, whatever the caller's environment says."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def huge_pages(on: bool) -> AbstractContextManager[None]:
    """Worlds started inside allocate large tensors on huge pages, or do not."""
    return environment({HUGE_PAGES: str(int(on))})


def both_worlds(fn: Callable[..., Any], *args: object, ranks: int, rounds: int = 1) -> Iterator[tuple[str, list[Any]]]:
    """fn(*args) on a fresh world of "plain" and on one of "huge" pages, `rounds` times: (pages, results by rank)."""
    for _ in range(rounds):
        for pages in ("plain", "huge"):
            with huge_pages(pages == "huge"):
                yield pages, launch.run(fn, *args, ranks=ranks, timeout=600)
