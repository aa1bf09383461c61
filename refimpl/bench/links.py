"""What a slow link delivers beside what it was asked for, and collectives over it beside their formulas.

Nodes are played on one machine: over a link of `refimpl.comm.link` (`--link`), or, without one, over TCP between two
network namespaces (see `namespaces.py`), of which nobody asks anything. First every pair of ranks is measured by
messages there and back (see `refimpl.comm.topology`): alpha is the latency, 8 / beta the bandwidth. Then all ranks send
to another node at once, both ways: what a node's cable carries. What a message takes without any link stands below: a
latency that is less than that cannot be had here. Then each collective, by each way, is held against the alpha-beta
formula (`refimpl.comm.level_model`) of what was asked; inside a node it has what was measured there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from refimpl import launch
from refimpl.bench import namespaces
from refimpl.bench.comm import COLLECTIVES, NATIVE, Way, contestants, numbers
from refimpl.bench.race import Times, Turns, from_one_instant, race, slowest
from refimpl.comm import hierarchy, ring
from refimpl.comm.alpha_beta import AlphaBeta
from refimpl.comm.axes import neighbours
from refimpl.comm.group import Group
from refimpl.comm.level_model import Choice, Levels, predict
from refimpl.comm.link import VARIABLE, Link
from refimpl.comm.nodes import RANKS_PER_NODE, ranks_per_node
from refimpl.comm.topology import ROW, SIZES, Topology, floor, itself, measure
from refimpl.ranks.environment import variables

HEAT = ("link", "nodes", "ranks")
CALLS = (*HEAT, "collective", "bytes")
DIRECT, RING, TWO_LEVEL = "direct", "ring", "two-level"
WAYS = {
    DIRECT: Choice(two_level=False, algorithm="exchange"),
    RING: Choice(two_level=False, algorithm="ring"),
    TWO_LEVEL: Choice(two_level=True, algorithm="exchange"),
}
REPEATS = 10
BAND = 0.1  # of a latency: later than that is said
ITSELF = "a message itself, us"


@dataclass(frozen=True)
class Figure:
    """One property of the link between two nodes. `asked` and `ratio`, delivered / asked, are None for a real one."""

    link: str
    nodes: int
    ranks: int
    figure: str
    delivered: float
    asked: float | None
    ratio: float | None


@dataclass(frozen=True)
class Found:
    """What a rank has seen. `message`: seconds of a message without a link, None where there is none to leave out."""

    topology: Topology
    calls: dict[tuple[str, int], Times]
    at_once: Times
    message: float | None


@dataclass(frozen=True)
class Call:
    """`ms`: median over calls of the slowest rank. `ratio`: to the formula's."""

    link: str
    nodes: int
    ranks: int
    collective: str
    bytes: int
    way: str
    ms: float
    formula_ms: float | None
    ratio: float | None


def heats(
    ranks: Sequence[int],
    sizes: Sequence[int],
    nodes: int,
    link: Link | None,
    collectives: Sequence[str] = COLLECTIVES,
    turns: Turns = Turns(),  # noqa: B008 (frozen)
) -> Iterator[list[Figure] | list[Call]]:
    """For each number of ranks the link's figures, then the rows of each collective and size in bytes.

    ValueError for ranks that make no such nodes; RuntimeError without a link where there are no namespaces.
    """
    if odd := [count for count in ranks if nodes < 2 or count % nodes]:
        raise ValueError(f"{odd[0]} ranks do not make {nodes} equal nodes, of which there must be two or more")
    if link is None and nodes != 2:
        raise ValueError(f"namespaces make 2 nodes, not {nodes}: give a link")
    for count in ranks:
        of_ranks: list[Found] = _run(count, nodes, link, partial(everything, sizes, collectives, turns))
        found = of_ranks[0].topology
        together = bandwidth(slowest([of.at_once for of in of_ranks]), count // nodes)
        name = f"{link.bits_per_second / 1e9:g} Gbit/s, {link.latency * 1e6:g} us" if link else "veth"
        yield figures(name, nodes, found, together, link, of_ranks[0].message)
        for collective, size in of_ranks[0].calls:
            expected = predict(collective, size, levels(found, nodes, link))
            times = {way: median(ms) for way, ms in slowest([of.calls[collective, size] for of in of_ranks]).items()}
            formulas = {way: 1e3 * expected[WAYS[way]] for way in times if WAYS.get(way) in expected}
            rows = [(way, ms, formulas.get(way)) for way, ms in times.items()]
            yield [
                Call(name, nodes, count, collective, size, way, ms, formula, ms / formula if formula else None)
                for way, ms, formula in rows
            ]


def everything(sizes: Sequence[int], collectives: Sequence[str], turns: Turns, messages: Sequence[int]) -> Found:
    """Runs on every rank."""
    group = Group.world()
    group.share_messages()
    near, far = neighbours(group, ranks_per_node(group.size) % group.size or 1)
    found = measure(group, messages, REPEATS, near.size)
    together = at_once(group, near.size, messages)
    message = itself(group, REPEATS)
    times = dict[tuple[str, int], Times]()
    for collective in collectives:
        for n in (numbers(size, group.size) for size in sizes):
            full, other, shard = (group.empty(s, torch.float32).zero_() for s in (n, n, n // group.size))
            contestants = ways(collective, group, near, far, full, other, shard)
            times[collective, 4 * n] = race(group, contestants, turns, from_one_instant)
    return Found(found, times, together, message)


def at_once(group: Group, each: int, messages: Sequence[int]) -> Times:
    """All ranks of a node send to the next node: milliseconds of a message in a row of them, of each of two sizes."""
    to, source = (group.rank + each) % group.size, (group.rank - each) % group.size

    def row(x: Tensor, out: Tensor) -> None:
        for _ in range(ROW):
            group.send_recv(x, to, out, source)

    calls = {}
    for size in (messages[-1] // 2, messages[-1]):
        x, out = group.empty(size, torch.uint8).zero_(), torch.empty(size, dtype=torch.uint8)
        calls[str(size)] = partial(row, x, out)
    return {size: [ms / ROW for ms in rows] for size, rows in race(group, calls, Turns(REPEATS // 2, 1)).items()}


def bandwidth(sends: Times, each: int) -> float:
    """Bits a second of `each` ranks together, from the median times of two sizes; a time is that of the slowest rank.

    (Of ranks that share a cable the first has its message when the last has waited for all of them. In the least time
    a rank came late, and the others had had the cable to themselves.)
    """
    (small, fast), (large, slow) = ((int(size), median(ms) / 1e3) for size, ms in sends.items())
    return 8 * each * (large - small) / max(slow - fast, 1e-9)


def ways(
    collective: str, group: Group, near: Group, far: Group, full: Tensor, other: Tensor, shard: Tensor
) -> dict[str, Way]:
    """Each way to do `collective`, on buffers as in `comm.contestants`; torch's own where it goes over the link too."""
    args = {
        "all_reduce": (full,),
        "reduce_scatter": (shard, full),
        "all_gather": (full, shard),
        "all_to_all": (other, full),
    }[collective]
    found: dict[str, Way] = {DIRECT: partial(getattr(group, collective), *args)}
    if hasattr(ring, collective):
        found[RING] = partial(getattr(ring, collective), group, *args)
    if near.size > 1 and far.size > 1:
        found[TWO_LEVEL] = partial(getattr(hierarchy, collective), near, far, *args)
    if group.link is None:
        found[NATIVE] = contestants(collective, {DIRECT: group}, full, other, shard)[NATIVE]
    return found


def figures(
    name: str, nodes: int, found: Topology, together: float, link: Link | None, message: float | None
) -> list[Figure]:
    """The link between nodes, as it was found, and what a message takes where it is not slow: no link is faster."""
    each = found.ranks // nodes
    _, far = found.alone(each)
    latency, bandwidth = (1e6 * link.latency, link.bits_per_second / 1e9) if link else (None, None)
    late = link is not None and far.alpha > (1 + BAND) * link.latency
    note = " (a message itself takes more)" if floor(link, message) else f" (more than {BAND:.0%} late)" if late else ""
    measured = [(f"latency, us{note}", 1e6 * far.alpha, latency)]
    if far.beta:
        measured.append(("bandwidth of a pair, Gbit/s", 8e-9 / far.beta, bandwidth))
    measured.append(("bandwidth of a node, Gbit/s", together / 1e9, bandwidth))
    if message is not None:
        measured.append((ITSELF, 1e6 * message, None))
    return [
        Figure(name, nodes, found.ranks, figure, delivered, asked, delivered / asked if asked else None)
        for figure, delivered, asked in measured
    ]


def levels(found: Topology, nodes: int, link: Link | None) -> Levels:
    """What the formulas need: far as it was asked for, the rest as it was found."""
    each = found.ranks // nodes
    measured = replace(found.by_nodes(each), pairwise=False)
    if link is None:
        return measured
    return replace(measured, far=AlphaBeta(link.latency, 8 / link.bits_per_second), crowd=float(each))


def _run(ranks: int, nodes: int, link: Link | None, work: Callable[[Sequence[int]], Any]) -> Any:
    """`work` on ranks that are so many nodes; it is told of which sizes messages should be."""
    if link is None:
        return namespaces.run(work, SIZES, ranks=ranks, timeout=600)
    # The largest takes about 10 ms on the link.
    large = max(4096, round(link.bits_per_second / 8 * 0.01))
    said = {VARIABLE: f"{link.bits_per_second!r}bit/s {link.latency!r}s", RANKS_PER_NODE: str(ranks // nodes)}
    with variables(said):
        return launch.run(work, (8, large // 16, large), ranks=ranks, timeout=600, device="cpu")
