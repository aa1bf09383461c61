"""Single collectives: `Group`'s and the ring's beside torch.distributed's own, on the same ranks and buffers.

Sizes are those of the full buffer (what an all-reduce reduces, a reduce-scatter takes in, an all-gather puts out), so
that n bytes always mean n(N-1)/N sent, and twice that for an all-reduce. The buffers lie where the ranks of one host
can read them in place, as the stages' do; to gloo it is memory like any other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from refimpl.bench.race import Times, Turns, both_worlds, by_pages, medians, race
from refimpl.comm import ring
from refimpl.comm.group import Group
from refimpl.comm.native import current
from refimpl.comm.shared import Shared

Way = Callable[[], object]

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
NATIVE = "torch.distributed"
HEAT = ("collective", "ranks", "bytes")  # what all rows of a heat have in common


@dataclass(frozen=True)
class Row:
    """`ms`: median over calls of the slowest rank. Ratios are to torch's own: on the same pages, the better of both."""

    implementation: str
    collective: str
    ranks: int
    bytes: int
    pages: str
    ms: float
    ratio_same_pages: float
    ratio_any_pages: float


def transports() -> dict[str, Group]:
    """A group of all ranks for each transport that they have; the first is what they get when they do not ask."""
    group = Group.world()
    if not isinstance(group.transport, Shared):
        return {"refimpl": group}
    return {"refimpl shared": group, "refimpl gloo": Group.world(transport="gloo")}


def contestants(
    collective: str, groups: Mapping[str, Group], full: Tensor, other: Tensor, shard: Tensor
) -> dict[str, Way]:
    """Each way to do `collective`: all_reduce in place in full [N*s], reduce_scatter full -> shard [s], all_gather
    shard -> full, all_to_all full -> other [N*s]. KeyError for another collective."""
    group = next(iter(groups.values()))
    ways: dict[str, dict[str, Way]] = {
        "all_reduce": {
            **{name: partial(g.all_reduce, full) for name, g in groups.items()},
            "refimpl ring": lambda: ring.all_reduce(group, full),
            NATIVE: lambda: dist.all_reduce(full),
        },
        "reduce_scatter": {
            **{name: partial(g.reduce_scatter, shard, full) for name, g in groups.items()},
            NATIVE: partial(current("reduce_scatter"), shard, full),
        },
        "all_gather": {
            **{name: partial(g.all_gather, full, shard) for name, g in groups.items()},
            NATIVE: partial(current("all_gather"), full, shard),
        },
        "all_to_all": {
            **{name: partial(g.all_to_all, other, full) for name, g in groups.items()},
            NATIVE: lambda: dist.all_to_all_single(other, full),
        },
    }
    return ways[collective]


def heat(collective: str, size: int, turns: Turns) -> Times:
    """Runs on every rank: race the ways to do `collective` on `size` bytes of zeros (repeated sums do not overflow)."""
    groups = transports()
    group = next(iter(groups.values()))
    n = numbers(size, group.size)
    full, other, shard = (group.empty(s, torch.float32).zero_() for s in (n, n, n // group.size))
    return race(group, contestants(collective, groups, full, other, shard), turns)


def numbers(size: int, ranks: int) -> int:
    """Elements in about `size` bytes of fp32 that the ranks can share evenly."""
    return max(1, size // 4 // ranks) * ranks


def measure(
    ranks: Sequence[int],
    sizes: Sequence[int],
    collectives: Sequence[str] = COLLECTIVES,
    turns: Turns = Turns(),  # noqa: B008 (frozen)
    rounds: int = 1,
) -> Iterator[list[Row]]:
    """The rows of one heat (ranks, collective, bytes) at a time; `sizes` in bytes."""
    for count in ranks:
        for collective in collectives:
            for size in sizes:
                times = by_pages(both_worlds(heat, collective, size, turns, ranks=count, rounds=rounds))
                yield rank_rows(times, collective, count, 4 * numbers(size, count))


def rank_rows(times: Mapping[str, Times], collective: str, ranks: int, size: int) -> list[Row]:
    """One row an implementation and kind of pages."""
    ms = medians(times)
    best = min(world[NATIVE] for world in ms.values())
    return [
        Row(name, collective, ranks, size, pages, value, value / world[NATIVE], value / best)
        for pages, world in ms.items()
        for name, value in world.items()
    ]
