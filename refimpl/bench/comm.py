"""Single collectives: `Group`'s and the ring's beside torch.distributed's own, on the same ranks and buffers.

Sizes are those of the full buffer (what an all-reduce reduces, a reduce-scatter takes in, an all-gather puts out), so
that n bytes always mean n(N-1)/N sent, and twice that for an all-reduce.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from refimpl.bench.race import Times, Turns, both_worlds, race, slowest
from refimpl.comm import ring
from refimpl.comm.group import Group

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


def contestants(collective: str, group: Group, full: Tensor, other: Tensor, shard: Tensor) -> dict[str, Way]:
    """Each way to do `collective`: all_reduce in place in full [N*s], reduce_scatter full -> shard [s], all_gather
    shard -> full, all_to_all full -> other [N*s]. KeyError for another collective."""
    # torch 2.13 renames the single-buffer collectives and warns about the old names, which 2.11 has alone.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    ways: dict[str, dict[str, Way]] = {
        "all_reduce": {
            "refimpl": lambda: group.all_reduce(full),
            "refimpl ring": lambda: ring.all_reduce(group, full),
            NATIVE: lambda: dist.all_reduce(full),
        },
        "reduce_scatter": {
            "refimpl": lambda: group.reduce_scatter(shard, full),
            NATIVE: lambda: reduce_scatter(shard, full),
        },
        "all_gather": {
            "refimpl": lambda: group.all_gather(full, shard),
            NATIVE: lambda: all_gather(full, shard),
        },
        "all_to_all": {
            "refimpl": lambda: group.all_to_all(other, full),
            NATIVE: lambda: dist.all_to_all_single(other, full),
        },
    }
    return ways[collective]


def heat(collective: str, size: int, turns: Turns) -> Times:
    """Runs on every rank: race the ways to do `collective` on `size` bytes of zeros (repeated sums do not overflow)."""
    group = Group.world()
    full = torch.zeros(numbers(size, group.size), device=group.device)
    shard = torch.zeros(len(full) // group.size, device=group.device)
    return race(group, contestants(collective, group, full, torch.zeros_like(full), shard), turns)


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
                times: dict[str, Times] = {}
                for pages, results in both_worlds(heat, collective, size, turns, ranks=count, rounds=rounds):
                    for name, calls in slowest(results).items():
                        times.setdefault(pages, {}).setdefault(name, []).extend(calls)
                yield rank_rows(times, collective, count, 4 * numbers(size, count))


def rank_rows(times: Mapping[str, Times], collective: str, ranks: int, size: int) -> list[Row]:
    """One row an implementation and kind of pages."""
    ms = {pages: {name: median(calls) for name, calls in world.items()} for pages, world in times.items()}
    best = min(world[NATIVE] for world in ms.values())
    return [
        Row(name, collective, ranks, size, pages, value, value / world[NATIVE], value / best)
        for pages, world in ms.items()
        for name, value in world.items()
    ]
