"""Chapter 13, three dimensions: one sequence on several ranks, and all axes of a mesh together.

`group` is a refimpl Group: `group.rank`, `group.size`, and

    group.send_recv(x, to, out, source)   # x goes to rank `to`, out comes from rank `source`
    group.all_reduce(x)                   # in place: the sum over ranks

Positions count the tokens of a sequence from 0; -1 is padding. IGNORED is a target that does
not count, as in torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from refimpl.comm.group import Group

IGNORED = -100

Part = tuple[
    Tensor, Tensor
]  # attention over some keys: out [..., Q, D] fp32, lse [..., Q] fp32
Layout = tuple[int, int, int, int]  # dp, pp, cp, tp


def merge(one: Part, other: Part) -> Part:
    """Attention over two sets of keys, from attention over each of them.

    A Part is the pair (out, lse) of one set: out [..., Q, D], softmax attention of Q queries
    over it, and lse [..., Q], the log of the sum of exp(score) over it; both fp32. Returned is
    that of all keys together. A query that sees no key of a set has lse -inf and out 0 there;
    if it sees none of either, so has the result. Scores may be in the thousands. A NaN in an
    out stays to be seen. Inputs are not changed.
    Example: lse 0 and 0 -> the mean of both outs, lse log(2). lse 3 and -inf -> the first.
    """
    raise NotImplementedError("merge")


def ring_attention(
    group: Group, q: Tensor, k: Tensor, v: Tensor, positions: Sequence[Tensor]
) -> Tensor:
    """Causal attention over a sequence of which each rank has S tokens, all ranks equally many.

    Forward only. q, k, v [H, S, D] are this rank's; positions[r] int64 [S] is where rank r's
    tokens stand, known to all. A query at position i looks at keys at 0 to i, scores divided by
    sqrt(D). Padding (-1) is looked at by nobody, and as a query gives 0. -> [H, S, D] in the
    dtype of q; scores and sums are fp32, also where q, k and v are bf16.

    In N - 1 hops the keys and values of all ranks pass by; each is sent as it is, in its own
    dtype. A rank has those of one other rank at a time, and no tensor is larger than the scores
    of S queries and S keys.
    """
    raise NotImplementedError("ring_attention")


def zigzag(tokens: int, ranks: int) -> list[Tensor]:
    """Where each rank's tokens stand in a sequence of `tokens`, so that causal attention is
    equal work for all.

    The sequence is cut into 2 N equal chunks. Rank r has chunk r, then chunk 2 N - 1 - r, each
    from its first token to its last. -> for every rank int64 [tokens / N]. ValueError if there
    are no 2 N equal chunks.
    Example: zigzag(8, 2) -> [0, 1, 6, 7] and [2, 3, 4, 5].
    """
    raise NotImplementedError("zigzag")


def context_batch(tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What a rank trains on: of sequences tokens [B, T] int64 the tokens at `positions` [S],
    and their targets.

    -> inputs [B, S], targets [B, S]. A token's target is the one that follows it in the
    sequence, which other ranks may have. The sequence's last token has none: IGNORED. At a
    position of -1, padding, the input is 0, the target IGNORED.
    Example: tokens [[5, 6, 7, 8]], positions [0, 3] -> inputs [[5, 8]], targets [[6, -100]].
    """
    raise NotImplementedError("context_batch")


def token_weight(group: Group, targets: Sequence[Tensor]) -> float:
    """What a rank multiplies each micro-batch's *sum* of losses with before backward.

    `group`: the data-parallel times the context ranks; their gradients are averaged, those of
    micro-batches add up.
    targets: one int64 tensor of any shape for each of this rank's micro-batches, perhaps none.
    The gradient must be that of the mean loss over all tokens of the step, whoever has them;
    IGNORED ones do not count. Without any token: a finite number. One all-reduce of one number.
    Example: 1 token on rank 0, and 2 + 1 on rank 1: 2 / 4 on both.
    """
    raise NotImplementedError("token_weight")


def coordinates(axes: Mapping[str, int], rank: int) -> dict[str, int]:
    """A rank's place on a mesh. axes: name -> size, outermost first; ranks are numbered with
    the last axis fastest.

    Example: coordinates({"dp": 2, "pp": 2, "tp": 2}, 5) -> {"dp": 1, "pp": 0, "tp": 1}.
    """
    raise NotImplementedError("coordinates")


def mesh_groups(axes: Mapping[str, int], along: Sequence[str]) -> list[list[int]]:
    """The groups along some axes: ranks are in one group if their coordinates on all *other*
    axes are equal.

    Each group is in the order of its ranks, and groups in that of their first ranks. Every rank
    is in one of them.
    Examples, axes {"dp": 2, "tp": 2}: along ["tp"] -> [[0, 1], [2, 3]], ["dp"] -> [[0, 2],
    [1, 3]], ["tp", "dp"] -> [[0, 1, 2, 3]], [] -> [[0], [1], [2], [3]].
    """
    raise NotImplementedError("mesh_groups")


def global_norm(
    group: Group, gradients: Sequence[tuple[Tensor | None, Sequence[int]]]
) -> float:
    """The L2 norm of a model's whole gradient, of which the ranks of `group` hold parts: the
    same float on every rank.

    gradients: for each parameter here its gradient, None if it has none, and the ranks of
    `group`, this one among them, in any order, that hold this very parameter with this very
    gradient: all tensor-parallel ranks for a norm's weight, first and last stage for a tied
    embedding. It counts once. A rank may hold nothing. Gradients are fp32 or 16 bits, and
    squares may be too large for either. What is not finite makes the norm so, on all ranks. One
    all-reduce of one number.
    """
    raise NotImplementedError("global_norm")


def best_layout(
    gpus: int,
    node: int,
    model: Mapping[str, int],
    memory: int,
    bytes_of: Callable[[Layout], int],
    seconds_of: Callable[[Layout], float],
) -> Layout:
    """The fastest layout (dp, pp, cp, tp) that fits: dp * pp * cp * tp == gpus, and at most
    `memory` bytes.

    tp divides `node`, the GPUs of a node, and model["heads"]; pp divides model["layers"], dp
    model["batch"], and 2 * cp model["tokens"] (zigzag). Of equally fast ones the one with the
    larger dp, then the smaller tp, then the smaller pp. ValueError if none fits. `bytes_of` and
    `seconds_of` are asked at most once a layout, and seconds_of, which is slow, only for what
    fits.
    """
    raise NotImplementedError("best_layout")
