"""Two levels: what can be done among near ranks is done there first, so that little is left to send far.

N = F L ranks: F nodes of L ranks each, numbered node by node. `near` are the L ranks of this rank's node, `far` the F
ranks that have its place in every node: the two axes of a mesh `Mesh({"far": F, "near": L})`.

    all_reduce       near reduce-scatter, far all-reduce of the L-th part, near all-gather
    reduce_scatter   near, of each node's row of the buffer; then far, of what that leaves
    all_gather       far; then near, of each node's row
    all_to_all       near, to the rank that has the receiver's place; it sends on what the whole node has for a far one
    broadcast        far, along the line of the root; then near

Traffic a rank, n bytes: near + far together are the flat collective's (an all-to-all's rows go twice, near and far). It
is the far share that counts:

                     near                far                  a node sends in all    a flat ring's node sends
    all_reduce       2n(L-1)/L           2(n/L)(F-1)/F        2n(F-1)/F              2n(N-1)/N
    reduce_scatter    n(L-1)/L            (n/L)(F-1)/F         n(F-1)/F               n(N-1)/N
    all_gather        n(L-1)/L            (n/L)(F-1)/F         n(F-1)/F               n(N-1)/N
    all_to_all        n(L-1)/L             n(F-1)/F           Ln(F-1)/F              (the flat one's: as many)

(n is the whole buffer; each node has one cable to the rest, which its L ranks share.) An all-to-all saves no bytes, but
messages: F-1 far ones a rank in place of N-L.

Time of an all-reduce by rings (alpha, beta of a level; a rank's far beta is that of the cable alone):

    flat         2(N-1) n/N beta_far + alpha_far        where (L-1) n/N beta_far hides all other alphas
    two levels   2(L-1) (alpha_near + n/L beta_near) + 2(F-1) n/F beta_far + alpha_far        where the cable is never
                 idle: while one rank's message is late, those of its L-1 neighbours are on it

With links inside a node much faster than the cable, that is F(N-1)/(N(F-1)) times as fast: 1.5 for 2 x 2 ranks, 2 for
two large nodes, little for many nodes, and less where n is so small that alpha_far counts. `level_model.py` has every
case, `refimpl bench hierarchy` measures it.

Order of the sum: the ranks of a node first, then the nodes, (g0 + g1) + (g2 + g3), which is not the order of
`Group.all_reduce`. By the groups' own collectives (`within`, `between` not given) each of the two sums is in rank
order; an all-reduce and a reduce-scatter give an element the same bits, on every rank. fp32 is summed and divided once;
bf16 and fp16 are summed in fp32 and rounded once a level, and a mean is a mean of means, which cannot overflow.

Thakur & Gropp 2003 ("Improving the performance of collective operations in MPICH"), Cho et al. 2019 (BlueConnect),
MiCS (Zhang et al. 2022, arXiv:2205.00119, section 3.3). DeepSpeed: deepspeed/runtime/comm/coalesced_collectives.py,
`all_to_all_quant_reduce`; its MiCS was removed in 0.19.7.
"""

from typing import Protocol

import torch
from torch import Tensor

from refimpl.comm import checks
from refimpl.comm.collectives import Op, divide
from refimpl.comm.group import Group
from refimpl.comm.streams import told

LOW = (torch.bfloat16, torch.float16)


class AllReduce(Protocol):
    """Whoever can all-reduce a group's tensor: `Group` itself, or the modules `ring`, `halving` and `tree`."""

    def all_reduce(self, group: Group, x: Tensor, op: Op, /) -> object: ...


class Algorithm(AllReduce, Protocol):
    """... and its halves: `Group`, `ring`, `halving`."""

    def reduce_scatter(self, group: Group, out: Tensor, x: Tensor, op: Op, /) -> object: ...

    def all_gather(self, group: Group, out: Tensor, x: Tensor, /) -> object: ...


def all_reduce(
    near: Group, far: Group, x: Tensor, op: Op = "sum", *, within: Algorithm = Group, between: AllReduce = Group
) -> None:
    """Replace x [n], contiguous, by its sum, mean or maximum over all F L ranks.

    Any n: if L does not divide it, a copy is made that is longer by less than L elements.
    """
    checks.reduction("two-level all_reduce", op, x, x)
    flat, n = x.detach().view(-1), x.numel()
    uneven = -n % near.size
    whole = torch.cat([flat, flat.new_zeros(uneven)]) if uneven else flat
    part = whole.view(near.size, -1)[near.rank]  # [n/L]
    within.reduce_scatter(near, part, whole, _inner(op, x))
    between.all_reduce(far, part, _inner(op, x))
    _divide(part, near.size * far.size, op, x)
    within.all_gather(near, whole, part)
    if uneven:
        flat.copy_(whole[:n])


def reduce_scatter(
    near: Group,
    far: Group,
    out: Tensor,
    x: Tensor,
    op: Op = "sum",
    *,
    within: Algorithm = Group,
    between: Algorithm = Group,
) -> None:
    """x [N*s] on every rank -> out [s]: the chunk of this rank, number far.rank * L + near.rank, reduced.

    `out` may be x's own chunk. ValueError if x is not N times as long as out.
    """
    checks.parts("two-level reduce_scatter", *_place(near, far), whole=x, part=out)
    checks.reduction("two-level reduce_scatter", op, x, out)
    rows = x.detach().view(far.size, -1)  # [F, L*s]: what each node will have
    mine = rows.new_empty(far.size, out.numel())  # [F, s]: my place's share in each
    for row, share in zip(rows, mine, strict=True):
        within.reduce_scatter(near, share, row, _inner(op, x))
    between.reduce_scatter(far, out.detach().view(-1), mine.view(-1), _inner(op, x))
    _divide(out.detach(), near.size * far.size, op, x)


def all_gather(
    near: Group, far: Group, out: Tensor, x: Tensor, *, within: Algorithm = Group, between: Algorithm = Group
) -> None:
    """x [s] on every rank -> out [N*s] in rank order. x may be out's own chunk.

    ValueError if out is not N times as long as x.
    """
    checks.parts("two-level all_gather", *_place(near, far), whole=out, part=x)
    checks.tensors("two-level all_gather", x=x, out=out)
    rows = out.detach().view(far.size, -1)  # [F, L*s]
    mine = rows.new_empty(far.size, x.numel())  # [F, s]
    between.all_gather(far, mine.view(-1), x.detach().view(-1))
    for row, share in zip(rows, mine, strict=True):
        within.all_gather(near, row, share)


def all_to_all(
    near: Group,
    far: Group,
    out: Tensor,
    x: Tensor,
    *,
    out_splits: list[int] | None = None,
    in_splits: list[int] | None = None,
) -> None:
    """Rank r's chunk i of x becomes rank i's chunk r of out. Splits count rows of dimension 0; equal by default.

    Uneven parts take one small near exchange more: a rank learns what its neighbours will hand it to send on.
    """
    (rank, ranks), nodes, each = _place(near, far), far.size, near.size
    checks.tensors("two-level all_to_all", x=x, out=out)
    checks.splits("two-level all_to_all", rank, ranks, x=(x, in_splits), out=(out, out_splits))
    given = in_splits or [x.shape[0] // ranks] * ranks
    taken = out_splits or [out.shape[0] // ranks] * ranks
    counts = told(given, torch.int64, x.device).view(nodes, each)  # [F, L]: rows to the rank with place l of node f
    passed = counts  # [F, L]: rows to my place in node f, from my neighbour l
    if in_splits or out_splits:
        passed = torch.empty_like(counts)
        for row, counted in zip(passed, counts, strict=True):
            near.all_to_all(row, counted)
    to_node = [sum(row) for row in passed.tolist()]
    rows = x.detach().split([sum(row) for row in counts.tolist()])  # type: ignore[no-untyped-call]
    middle = x.new_empty(sum(to_node), *x.shape[1:])  # by node of the receiver, then by neighbour
    for f, part in enumerate(middle.split(to_node)):  # type: ignore[no-untyped-call]
        near.all_to_all(part, rows[f], out_splits=passed[f].tolist(), in_splits=counts[f].tolist())
    arriving = [sum(taken[f * each : (f + 1) * each]) for f in range(nodes)]
    far.all_to_all(out.detach(), middle, out_splits=arriving, in_splits=to_node)


def broadcast(near: Group, far: Group, x: Tensor, root: int = 0) -> None:
    """x of rank `root`, number far.rank * L + near.rank -> x on every rank."""
    checks.member("two-level broadcast", "root", root, near.size * far.size)
    if near.rank == root % near.size:
        far.broadcast(x, root // near.size)
    near.broadcast(x, root % near.size)


def _inner(op: Op, x: Tensor) -> Op:
    """What each level does for `op` on x: the sum, to be divided once, where a sum is not rounded to 16 bits."""
    return "sum" if op == "mean" and x.dtype not in LOW else op


def _divide(total: Tensor, ranks: int, op: Op, x: Tensor) -> None:
    """... and what is left to do for a mean at the end. `total` may be wider than x."""
    if _inner(op, x) != op:
        divide(total, ranks, op)


def _place(near: Group, far: Group) -> tuple[int, int]:
    """(this rank's number among all, how many these are)."""
    return far.rank * near.size + near.rank, far.size * near.size
