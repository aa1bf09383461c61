"""Which ranks are near, found by measuring: every pair sends messages of a few sizes there and back, alone.

A pair's alpha and beta are fitted to the least of several times (what the link can do, not what a busy machine gave).
Sorted by the time of one middle-sized message, the pairs of a machine of nodes fall into two heaps; where the gap
between two neighbours in that order is the widest, and wide enough, lies the border. Who is joined by near pairs is a
node. With nodes found, all ranks send to a neighbour inside at once, as in a collective, several messages one after
another: they share memory and cores, and what one of these messages takes is the near link. (The first after a barrier
does not count: it waits for who left the barrier last, up to a millisecond. Of empty messages the least row counts, as
between pairs; of larger ones the middle row: in the least, ranks that came late had the cable to themselves.) All ranks
of two nodes do the same with empty messages, which is the far link's alpha, and post rows of larger ones without
waiting in between, so that a cable is never idle: what a message of these takes tells how much they share it
(`level_model.crowd`). Two ranks of a node that send to two others tell how many cables there are.

N ranks: N(N-1)/2 pairs one after another, each a fraction of a second.
NCCL's own search asks the hardware (src/graph/topo.cc reads PCI and NVLink from the system); this asks the clock, as
nccl-tests do, so it sees what is throttled in software too.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from refimpl.comm.alpha_beta import AlphaBeta, fit
from refimpl.comm.group import Group
from refimpl.comm.level_model import Levels
from refimpl.comm.link import Link

SIZES = (8, 65_536, 1 << 20, 1 << 23)  # bytes
LONG = 0.02  # seconds: after a message that took so long, the pair sends no larger ones (but two sizes at least)
PROBE = 65_536  # bytes of the message by which pairs are compared
GAP = 2.0  # times slower than the next nearer pair is another level
ADDED = 1 << 20  # elements
ROW = 6  # messages one after another, when all ranks send at once

Pair = tuple[int, int]  # the lower rank first


@dataclass(frozen=True)
class Topology:
    """`pairs`: every two ranks, the lower first. `crowd`, `pairwise`: see `level_model`; 1 and False for one level.

    `inside`, `across`: a link in a node, and one between two, while all ranks use theirs; None for one level.
    """

    ranks: int
    pairs: Mapping[Pair, AlphaBeta]
    crowd: float
    gamma: float
    pairwise: bool = False
    inside: AlphaBeta | None = None
    across: AlphaBeta | None = None

    def of(self, a: int, b: int) -> AlphaBeta:
        """The link between two ranks. KeyError for a rank and itself."""
        return self.pairs[min(a, b), max(a, b)]

    @property
    def nodes(self) -> list[list[int]]:
        """Ranks that are near each other, in rising order; one node if no pair is farther than others."""
        return neighbourhoods(self.ranks, {pair: link.seconds(PROBE) for pair, link in self.pairs.items()})

    @property
    def levels(self) -> Levels | None:
        """By the nodes that were found. None if these are not consecutive ranks, equally many, and for one rank."""
        nodes, each = self.nodes, len(self.nodes[0])
        regular = nodes == [list(range(i, i + each)) for i in range(0, self.ranks, each)]
        return self.by_nodes(each) if self.pairs and regular else None

    def by_nodes(self, each: int) -> Levels:
        """What predicts collectives on nodes of `each` consecutive ranks: as all find the links that use them at once.

        That is `inside` and the alpha of `across`. Where these are missing, medians over near and far pairs; where
        there is one level only, both links are the same.
        """
        near, far = self.alone(each)
        far = AlphaBeta(self.across.alpha, far.beta) if self.across else far
        return Levels(each, self.ranks // each, self.inside or near, far, self.crowd, self.gamma, self.pairwise)

    def alone(self, each: int) -> tuple[AlphaBeta, AlphaBeta]:
        """A pair in a node and one of two nodes that have the machine to themselves: medians over all such pairs."""
        near = [link for (a, b), link in self.pairs.items() if a // each == b // each]
        far = [link for (a, b), link in self.pairs.items() if a // each != b // each]
        return _middle(near or far), _middle(far or near)


def neighbourhoods(ranks: int, seconds: Mapping[Pair, float]) -> list[list[int]]:
    """Nodes of ranks that are joined by pairs this side of the widest gap among the times, if it is `GAP` wide."""
    times = sorted(seconds.values())
    wide, border = max(((b / a, a) for a, b in pairwise(times)), default=(0.0, 0.0))
    node = list(range(ranks))
    for (a, b), t in seconds.items():
        if wide < GAP or t <= border:
            node = [node[a] if n == node[b] else n for n in node]
    found: dict[int, list[int]] = {}
    for rank, n in enumerate(node):
        found.setdefault(n, []).append(rank)
    return list(found.values())


def measure(group: Group, sizes: Sequence[int] = SIZES, repeats: int = 4, each: int | None = None) -> Topology:
    """Measure every pair of the group's ranks by its messages. A collective; the same result on every rank.

    each: nodes are known to be of so many consecutive ranks; by default they are found. ValueError for sizes of which
    no line can be fitted, or no repeats.
    """
    if len(set(sizes)) < 2 or min(sizes) < 1 or repeats < 1:
        raise ValueError(f"measure: two sizes of 1 byte or more and a repeat are needed, not {sizes}, {repeats}")
    measured = _one_after_another(group, sorted(sizes), repeats)
    pairs = {pair: fit(sorted(sizes)[: len(times)], times) for pair, times in measured.items()}
    alone = Topology(group.size, pairs, 1.0, _adding(group))
    nodes = alone.nodes if each is None else [list(range(i, i + each)) for i in range(0, group.size, each)]
    each = min(len(node) for node in nodes)
    if each == 1 or len(nodes) == 1:
        return alone
    neighbours = {a: b for node in nodes for a, b in zip(node[::2], node[1::2], strict=False)}
    sent = _quick(sizes, measured[nodes[0][0], nodes[0][1]])
    inside = fit(sent, _together(group, neighbours, sent, repeats))
    lines = dict(zip(nodes[0][:each], nodes[1][:each], strict=True))
    first = min(nodes[0][0], nodes[1][0]), max(nodes[0][0], nodes[1][0])
    sent = _quick(sizes, measured[first])
    [alpha] = _together(group, lines, sent[:1], repeats)
    across = AlphaBeta(alpha, fit(sent, _together(group, lines, sent, repeats, ahead=True)).beta)
    crowd = across.beta / pairs[first].beta if pairs[first].beta else 1.0
    crowd, pairwise = min(max(crowd, 1.0), float(each)), False
    if len(nodes) > 2 and crowd > 1 + each / 4:  # they share: is that one cable for all nodes?
        apart = {nodes[0][0]: nodes[1][0], nodes[0][1]: nodes[2][0]}
        pairwise = fit(sent, _together(group, apart, sent, repeats, ahead=True)).beta < 1.5 * pairs[first].beta
    return Topology(group.size, pairs, crowd, alone.gamma, pairwise, inside, across)


def itself(group: Group, repeats: int = 4) -> float | None:
    """Seconds that a message takes where no link slows it: no latency below that can be had. A collective.

    None where the group has no link.
    """
    if group.link is None:
        return None
    fast = group.throttled(Link(math.inf))
    fast.share_messages()
    return median(pair.alpha for pair in measure(fast, SIZES[:2], repeats).pairs.values())


def floor(link: Link | None, message: float | None) -> str:
    """Where a message takes more, in seconds, than the link should: that its latency is not to be had here."""
    if link is None or message is None or message <= link.latency:
        return ""
    return (
        f"a message takes {1e6 * message:.0f} us by itself, more than the link's {1e6 * link.latency:g} us: "
        "this machine plays no shorter latency"
    )


def tell_floor(group: Group) -> None:
    """Print `floor` on rank 0, if there is something to say. A collective."""
    note = floor(group.link, itself(group))
    if note and group.rank == 0:
        print(note, flush=True)


def _one_after_another(group: Group, sizes: Sequence[int], repeats: int) -> dict[Pair, list[float]]:
    """Every pair: seconds of one way for each size, from the smallest on."""
    mine: dict[Pair, list[float]] = {}
    for pair in [(a, b) for a in range(group.size) for b in range(a + 1, group.size)]:
        group.barrier()
        if group.rank in pair:
            times = _ping(group, pair, sizes, repeats)
            if group.rank == pair[0]:  # who began: the other's clock stops before its last message has arrived
                mine[pair] = times
    found: dict[Pair, list[float]] = {}
    for of_rank in group.all_gather_object(mine):
        found |= of_rank
    return found


def _quick(sizes: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Those of which several can be sent, two at least."""
    return sorted(sizes)[: max(2, sum(t < LONG for t in seconds))]


def _together(
    group: Group, lines: Mapping[int, int], sizes: Sequence[int], repeats: int, ahead: bool = False
) -> list[float]:
    """Each rank of a node exchanges messages with one of the other: seconds of one, of the slowest, for each size.

    `ahead`: all of a row are posted before the first is waited for.
    """
    peer = {**lines, **{b: a for a, b in lines.items()}}.get(group.rank, -1)
    seconds = []
    for size in sizes:
        out, message = (torch.zeros(size, dtype=torch.uint8, device=group.device) for _ in range(2))
        times = []
        for _ in range(repeats + 1):
            group.barrier()
            begun = time.perf_counter()
            if peer >= 0:
                if not ahead:  # the first waits for who left the barrier last
                    group.send_recv(message, peer, out, peer, tag="topology")
                    group.settle()
                    begun = time.perf_counter()
                row = [group.send_recv(message, peer, out, peer, async_op=ahead, tag="topology") for _ in range(ROW)]
                for work in row:
                    work.wait()
            group.settle()
            times.append((time.perf_counter() - begun) / ROW)
        slowest = [max(repeat) for repeat in zip(*group.all_gather_object(times), strict=True)]
        seconds.append((min if size == sizes[0] else median)(slowest[1:]))
    return seconds


def _ping(group: Group, pair: Pair, sizes: Sequence[int], repeats: int) -> list[float]:
    """There and back, `repeats` times after one that does not count; half of the shortest."""
    first, peer = group.rank == pair[0], pair[group.rank == pair[0]]
    seconds: list[float] = []
    for size in sizes:
        if len(seconds) > 1 and not _go_on(group, peer, first, seconds[-1] < LONG):
            break
        message, best = torch.zeros(size, dtype=torch.uint8, device=group.device), math.inf
        for repeat in range(repeats + 1):
            begun = time.perf_counter()
            if first:
                group.send(message, peer, tag="topology")
            group.recv(message, peer, tag="topology")
            if not first:
                group.send(message, peer, tag="topology")
            group.settle()
            if repeat:
                best = min(best, (time.perf_counter() - begun) / 2)
        seconds.append(best)
    return seconds


def _go_on(group: Group, peer: int, first: bool, wish: bool) -> bool:
    """What the first of the two wishes."""
    said = torch.tensor([float(wish)], device=group.device)
    if first:
        group.send(said, peer, tag="topology")
    else:
        group.recv(said, peer, tag="topology")
    return bool(said.item())


def _adding(group: Group) -> float:
    """Seconds a byte that is added to another."""
    a, b, best = torch.zeros(ADDED, device=group.device), torch.zeros(ADDED, device=group.device), math.inf
    for _ in range(4):
        begun = time.perf_counter()
        a.add_(b)
        group.settle()
        best = min(best, time.perf_counter() - begun)
    return float(median(group.all_gather_object(best / a.nbytes)))


def _middle(links: Sequence[AlphaBeta]) -> AlphaBeta:
    return AlphaBeta(median(link.alpha for link in links), median(link.beta for link in links))
