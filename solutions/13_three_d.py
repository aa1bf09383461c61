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
    lse = torch.logaddexp(one[1], other[1])
    out = torch.zeros_like(one[0])
    for part, log_sum in (one, other):
        share = (log_sum - lse).exp().masked_fill(log_sum.isneginf(), 0)
        out += share.unsqueeze(-1) * part
    return out, lse


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
    out = torch.zeros(q.shape, dtype=torch.float32), torch.full(q.shape[:-1], -math.inf)
    here = torch.stack([k, v])
    for hop in range(group.size):
        theirs = positions[(group.rank - hop) % group.size]
        seen = (theirs >= 0) & (theirs <= positions[group.rank][:, None])
        scores = q.float() @ here[0].float().mT * q.shape[-1] ** -0.5
        lse = scores.masked_fill_(~seen, -math.inf).logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(~seen, 0)
        out = merge(out, (weights @ here[1].float(), lse))
        if hop < group.size - 1:
            arrived = torch.empty_like(here)
            group.send_recv(
                here, (group.rank + 1) % group.size, arrived, (group.rank - 1) % group.size
            )
            here = arrived
    return out[0].to(q.dtype)


def zigzag(tokens: int, ranks: int) -> list[Tensor]:
    """Where each rank's tokens stand in a sequence of `tokens`, so that causal attention is
    equal work for all.

    The sequence is cut into 2 N equal chunks. Rank r has chunk r, then chunk 2 N - 1 - r, each
    from its first token to its last. -> for every rank int64 [tokens / N]. ValueError if there
    are no 2 N equal chunks.
    Example: zigzag(8, 2) -> [0, 1, 6, 7] and [2, 3, 4, 5].
    """
    if tokens % (2 * ranks):
        raise ValueError(f"{tokens} tokens are not {2 * ranks} equal chunks")
    chunks = torch.arange(tokens).chunk(2 * ranks)
    return [torch.cat([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks)]


def context_batch(tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What a rank trains on: of sequences tokens [B, T] int64 the tokens at `positions` [S],
    and their targets.

    -> inputs [B, S], targets [B, S]. A token's target is the one that follows it in the
    sequence, which other ranks may have. The sequence's last token has none: IGNORED. At a
    position of -1, padding, the input is 0, the target IGNORED.
    Example: tokens [[5, 6, 7, 8]], positions [0, 3] -> inputs [[5, 8]], targets [[6, -100]].
    """
    following = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)], 1)
    padding = positions < 0
    inputs = tokens[:, positions].masked_fill(padding, 0)
    return inputs, following[:, positions].masked_fill(padding, IGNORED)


def token_weight(group: Group, targets: Sequence[Tensor]) -> float:
    """What a rank multiplies each micro-batch's *sum* of losses with before backward.

    `group`: the data-parallel times the context ranks; their gradients are averaged, those of
    micro-batches add up.
    targets: one int64 tensor of any shape for each of this rank's micro-batches, perhaps none.
    The gradient must be that of the mean loss over all tokens of the step, whoever has them;
    IGNORED ones do not count. Without any token: a finite number. One all-reduce of one number.
    Example: 1 token on rank 0, and 2 + 1 on rank 1: 2 / 4 on both.
    """
    count = torch.tensor([sum(int((t != IGNORED).sum()) for t in targets)], dtype=torch.float64)
    group.all_reduce(count)
    return group.size / max(1.0, count.item())


def coordinates(axes: Mapping[str, int], rank: int) -> dict[str, int]:
    """A rank's place on a mesh. axes: name -> size, outermost first; ranks are numbered with
    the last axis fastest.

    Example: coordinates({"dp": 2, "pp": 2, "tp": 2}, 5) -> {"dp": 1, "pp": 0, "tp": 1}.
    """
    place = {}
    for name, size in reversed(axes.items()):
        rank, place[name] = divmod(rank, size)
    return {name: place[name] for name in axes}


def mesh_groups(axes: Mapping[str, int], along: Sequence[str]) -> list[list[int]]:
    """The groups along some axes: ranks are in one group if their coordinates on all *other*
    axes are equal.

    Each group is in the order of its ranks, and groups in that of their first ranks. Every rank
    is in one of them.
    Examples, axes {"dp": 2, "tp": 2}: along ["tp"] -> [[0, 1], [2, 3]], ["dp"] -> [[0, 2],
    [1, 3]], ["tp", "dp"] -> [[0, 1, 2, 3]], [] -> [[0], [1], [2], [3]].
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(product(*(range(size) for size in axes.values()))):
        key = tuple(at for name, at in zip(axes, place, strict=True) if name not in along)
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


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
    squares = torch.zeros(1, dtype=torch.float64)
    for grad, holders in gradients:
        if grad is not None and group.rank == min(holders):
            squares += grad.double().square().sum()
    group.all_reduce(squares)
    return squares.sqrt().item()


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
    found: dict[tuple[float, int, int, int], Layout] = {}
    for tp in (
        n
        for n in range(1, node + 1)
        if node % n == 0 and model["heads"] % n == 0 and gpus % n == 0
    ):
        for pp in (
            n
            for n in range(1, model["layers"] + 1)
            if model["layers"] % n == 0 and gpus // tp % n == 0
        ):
            rest = gpus // tp // pp
            for cp in (
                n
                for n in range(1, rest + 1)
                if rest % n == 0 and model["tokens"] % (2 * n) == 0
            ):
                layout = (rest // cp, pp, cp, tp)
                if model["batch"] % layout[0] == 0 and bytes_of(layout) <= memory:
                    found[seconds_of(layout), -layout[0], tp, pp] = layout
    if not found:
        raise ValueError(f"no layout of {gpus} GPUs fits {memory} bytes")
    return found[min(found)]


HINTS = {
    "merge": [
        "Undo the division: exp(lse) is a set's sum of weights, exp(lse) * out what was added up. Add, then divide.",
        "exp(1000) overflows. Divide first: the share of a set is exp(its lse - the lse of both); torch.logaddexp.",
        "-inf - -inf is NaN. A set with lse -inf has the share 0: masked_fill after exp.",
    ],
    "ring_attention": [
        "Begin with nothing seen: out 0, lse -inf. In each hop attend to the keys at hand, `merge`, and pass them on.",
        "After h hops to the right the keys at hand are those of rank (rank - h) % N: their positions make the mask.",
        "logsumexp of a row that is all -inf is -inf, and exp(-inf - -inf) is NaN: fill masked weights with 0.",
        "Convert to fp32 for each product, not before sending. N - 1 hops: the last needs no passing on.",
    ],
    "zigzag": [
        "Draw the triangle of the causal mask, a row for each of 2 N chunks: which two rows make 2 N - 1 whole blocks?",
        "torch.arange(tokens).chunk(2 * ranks), then chunks r and 2 * ranks - 1 - r, one behind the other.",
    ],
    "context_batch": [
        "Shift the whole sequence first, then take this rank's positions of both.",
        "tokens[:, -1] is the last token, not padding: masked_fill what stands at positions < 0.",
    ],
    "token_weight": [
        "The mean over ranks divides by N. So each sum must be multiplied by N, and divided by all tokens.",
        "Count over all micro-batches first, then one all-reduce. max(1, count) keeps 0 / 0 away.",
    ],
    "coordinates": [
        "The last axis counts 0, 1, 2, ... with the rank: rank % size. The rest, rank // size, belongs to the others.",
        "divmod, from the last axis to the first; then put the names into the order of `axes`.",
    ],
    "mesh_groups": [
        "Which ranks meet? Those that differ only along `along`: so the coordinates on all other axes name a group.",
        "A dict from that tuple to a list, filled in the order of ranks.",
    ],
    "global_norm": [
        "Each parameter must be counted on one of its holders alone. On which can all of them agree without a word?",
        "Sum squares in fp64 where group.rank == min(holders); all-reduce; the root comes last.",
    ],
    "best_layout": [
        "Three loops: tp, pp, cp. dp is what is left.",
        "Ask bytes_of, and seconds_of only if it fits. min over (seconds, -dp, tp, pp).",
    ],
}
