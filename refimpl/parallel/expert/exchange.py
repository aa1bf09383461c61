"""Rows change ranks: an all-to-all in uneven parts, whose gradient is the same with the parts turned round.

Every rank knows what every rank sends to whom (`loads`, one small all-gather), so each knows what will come, and an
expert that gets nothing, or everything, is no special case. `Flat` is one all-to-all. `Hierarchical` is two, over the
ranks of a node and then over the nodes:

    flat            a rank sends ep - 1 messages, most of them over the network, each small
    hierarchical    with L ranks a node, those for one node are put together inside the node first: ep / L - 1 messages
                    over the network, each L times as large, for n (L-1)/L more bytes inside the node

DeepSpeed-MoE: Rajbhandari et al. 2022, arXiv:2201.05596, section 5.3; Tutel: Hwang et al. 2022, arXiv:2206.03382,
section 3.3. DeepSpeed: deepspeed/moe/sharded_moe.py, `_AllToAll`.

    rows[s][d]    rows that rank s of the group has for rank d
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from refimpl.comm.axes import neighbours
from refimpl.comm.group import Group
from refimpl.comm.streams import told

TAG, INSIDE, ACROSS = "tokens", "tokens in the node", "tokens between nodes"
Table = Sequence[Sequence[int]]

# x [R, M], this rank's rows by the rank they go to -> rows by the rank they come from. A collective.
Way = Callable[[Tensor, Table], Tensor]


class Flat:
    """Straight to each rank."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self, x: Tensor, rows: Table) -> Tensor:
        return all_to_all(x, self.group, rows[self.group.rank], [row[self.group.rank] for row in rows])


class Hierarchical:
    """To this node's rank that has the place of the destination in its own node, and from there across."""

    def __init__(self, group: Group, node: int) -> None:
        """`node`: ranks of the group on a node, consecutive ones. A collective. ValueError if it does not divide it."""
        if node < 1 or group.size % node:
            raise ValueError(f"{node} ranks a node: a hierarchical all-to-all of {group.size} ranks has whole nodes")
        self.rank = group.rank
        self.inside, self.across = neighbours(group, node)

    def __call__(self, x: Tensor, rows: Table) -> Tensor:
        local, nodes = self.inside.size, self.across.size
        node, place = divmod(self.rank, local)
        here = rows[node * local : (node + 1) * local]  # what the ranks of this node send
        sent = by(x, here[place], nodes, local)  # [place of the destination][its node]
        theirs = [[row[n * local + place] for n in range(nodes)] for row in here]  # what of it is for my place
        mine = [sum(here[place][n * local + p] for n in range(nodes)) for p in range(local)]
        inside = all_to_all(sent, self.inside, mine, [sum(row) for row in theirs], INSIDE)  # [source here][node]
        sent = by(inside, [n for row in theirs for n in row], local, nodes)  # [node][source here]
        goes = [sum(row[n] for row in theirs) for n in range(nodes)]
        comes = [sum(row[self.rank] for row in rows[n * local : (n + 1) * local]) for n in range(nodes)]
        return all_to_all(sent, self.across, goes, comes, ACROSS)  # [node][source there]


def by(x: Tensor, sizes: Sequence[int], outer: int, inner: int) -> Tensor:
    """Blocks of x in the order `[outer][inner]`, of `sizes` rows -> the same in the order `[inner][outer]`."""
    if outer == 1 or inner == 1:
        return x
    blocks = x.split(list(sizes))  # type: ignore[no-untyped-call]
    return torch.cat([blocks[o * inner + i] for i in range(inner) for o in range(outer)])


def all_to_all(x: Tensor, group: Group, goes: Sequence[int], comes: Sequence[int], tag: str = TAG) -> Tensor:
    """x [R, M], goes[r] rows to rank r -> comes[r] rows of rank r. A group of one sends nothing."""
    if group.size == 1:
        return x
    out = x.new_empty(sum(comes), *x.shape[1:])
    group.all_to_all(out, x.contiguous(), in_splits=list(goes), out_splits=list(comes), tag=tag)
    return out


def by_source(
    ask: Callable[[Tensor, Sequence[int]], Tensor], x: Tensor, sizes: Sequence[Sequence[int]]
) -> Tensor:  # fmt: skip
    """ask(rows, sizes by expert) for each source's rows of x [R, ..], the last source first, as in `Experts`."""
    blocks = x.split([sum(row) for row in sizes])  # type: ignore[no-untyped-call]
    last_first = [ask(*call) for call in zip(blocks[::-1], sizes[::-1], strict=True)]
    return torch.cat(last_first[::-1])


def turned(rows: Table) -> list[list[int]]:
    """The way back: `rows[d][s]`."""
    return [list(column) for column in zip(*rows, strict=True)]


def loads(sizes: Sequence[int], group: Group, tag: str = "tokens per expert") -> list[list[int]]:
    """Every rank's `sizes` [E], in rank order. Sends 8 E (N-1) bytes; the host waits for them."""
    mine = told(sizes, torch.int64, group.device)
    out = torch.empty(group.size * len(sizes), dtype=torch.int64, device=group.device)
    group.all_gather(out, mine, tag=tag)
    found: list[list[int]] = out.view(group.size, -1).tolist()
    return found
