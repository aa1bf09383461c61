"""Chapter 11, tensor parallelism: one layer on several ranks.

Weights stay where they are, activations travel. A matrix is cut by columns (each rank computes
some outputs) or by rows (each rank has some inputs, and computes a part of every output's sum).
What a rank exchanges in forward has a counterpart in backward, its transpose, and none of the
group's collectives is recorded by autograd: so the exchanges are torch.autograd.Functions.

`group` is a refimpl Group: `group.rank`, `group.size` (N), and, for contiguous tensors that
need no gradient,

    group.all_reduce(x)            # x becomes the ranks' sum; with op="max" their maximum
    group.all_gather(out, x)       # x [s] on every rank -> out [N*s], in rank order
    group.reduce_scatter(out, x)   # x [N*s] on every rank -> out [s]: rank r's chunk of the sum

Shapes do not matter to them: they take elements in the order in which they lie in memory. B
sequences of T tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refimpl.comm.group import Group


def enter(x: Tensor, group: Group) -> Tensor:
    """Where a whole tensor enters layers that are split over the ranks: x itself.

    Megatron-LM calls it f. x is equal on all ranks, of any shape and dtype, contiguous or not.
    In backward each rank has the gradient of what it alone computed from the result; what goes
    on is their sum, by one all-reduce. Forward sends nothing. The gradient that arrives may
    belong to somebody else too: it keeps its values. So do x and its other uses.
    """
    raise NotImplementedError("enter")


def leave(x: Tensor, group: Group) -> Tensor:
    """Where partial sums leave split layers: the sum of all ranks' x, equal on all.

    Megatron-LM calls it g. One all-reduce in forward; x keeps its values, is of any shape and
    dtype, contiguous or not. Backward sends nothing: what comes after is computed alike on
    every rank, so the gradient that arrives is equal on all of them, and whole.
    """
    raise NotImplementedError("leave")


class ColumnLinear(nn.Module):
    """Some outputs of a linear layer: rank r has the r-th of N equal parts of them.

    layer = ColumnLinear(nn.Linear(K, M), group)
    y = layer(x)                                  # x [.., K], equal on all ranks -> [.., M/N]

    weight [M/N, K] and bias [M/N], or None, are its only parameters, in memory of their own,
    with dtype and requires_grad of the plain ones.
    """

    def __init__(self, plain: nn.Linear, group: Group) -> None:
        """`plain` is equal on all ranks. Nothing of it may stay alive but this rank's part.

        Nothing is sent. ValueError with both numbers if N does not divide M.
        """
        raise NotImplementedError("ColumnLinear.__init__")

    def forward(self, x: Tensor) -> Tensor:
        """x [.., K] -> [.., M/N]. Sends nothing; backward sends the gradient of x, once."""
        raise NotImplementedError("ColumnLinear.forward")


class RowLinear(nn.Module):
    """Some inputs of a linear layer: rank r has the r-th of N equal parts of them, and gets all
    outputs.

    layer = RowLinear(nn.Linear(K, M), group)
    y = layer(x)                                  # x [.., K/N], this rank's part -> [.., M]

    weight [M, K/N] and bias [M], or None, are its only parameters, as in ColumnLinear. The bias
    is whole on every rank.
    """

    def __init__(self, plain: nn.Linear, group: Group) -> None:
        """As of ColumnLinear. ValueError with both numbers if N does not divide K."""
        raise NotImplementedError("RowLinear.__init__")

    def forward(self, x: Tensor) -> Tensor:
        """x [.., K/N] -> [.., M]. Sends the partial sums, once; backward sends nothing."""
        raise NotImplementedError("RowLinear.forward")


def cut_qkv(whole: Tensor, heads: int, kv_heads: int, rank: int, ranks: int) -> Tensor:
    """This rank's rows of the one matrix that makes queries, keys and values, in memory of
    their own and without a graph.

    whole [(heads + 2 kv_heads) d, K]: all heads of queries, below them all heads of keys, then
    all of values, d rows each; or a bias [(heads + 2 kv_heads) d]. Query head i reads key/value
    head i // (heads / kv_heads). Rank r has the r-th of N equal runs of key/value heads, and
    the queries that read them: so attention needs no message. The result is in the same order:
    queries, keys, values. ValueError with both numbers if N does not divide kv_heads.
    Example: 4 heads, 2 kv_heads, d = 1, rank 1 of 2: rows 2, 3 (queries), 5 (key), 7 (value).
    """
    raise NotImplementedError("cut_qkv")


def vocab_embedding(ids: Tensor, part: Tensor, first: int, group: Group) -> Tensor:
    """F.embedding(ids, table), of which each rank has some rows: part [v, C], rows first to
    first + v - 1 of V.

    ids [..] int64, equal on all ranks, 0 to V - 1 -> [.., C], equal on all ranks, in the
    table's dtype. v is not the same on all ranks. Each rank looks up what it has, and gives
    zeros for the other tokens; one all-reduce of the result. Backward sends nothing, and
    part.grad gets a gradient for its own tokens alone. ids keeps its values.
    """
    raise NotImplementedError("vocab_embedding")


def vocab_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    first: int,
    group: Group,
    ignore_index: int = -100,
) -> Tensor:
    """F.cross_entropy(whole logits, targets, ignore_index=ignore_index), of which each rank has
    some columns.

    logits [n, v]: the tokens first to first + v - 1 of V, fp32 or bf16; targets [n] int64,
    equal on all ranks -> an fp32 scalar, the mean over the rows that count, equal on all ranks;
    0 with zero gradients if none does.

        loss of a row = log(sum over v of exp(z_v - m)) + m - z_target

    where m is the row's maximum, so that exp is at most 1.

    Three numbers a row travel, fp32: the maximum, the sum, the target's logit (0 from the ranks
    that have not got it). Write a torch.autograd.Function: backward sends nothing, d loss of a
    row / d z_v = exp(z_v - m) / sum - [v is the target], in the logits' dtype. At most one
    tensor of n v fp32 numbers is kept for it, and not changed: with retain_graph it can be
    called again. Nothing is as large as n V, and logits and targets keep their values.
    """
    raise NotImplementedError("vocab_cross_entropy")


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Sequence parallelism: this rank's tokens -> all tokens, where they enter split layers.

    x [B, T/N, C]: rank r has the r-th of N equal runs of each sequence -> [B, T, C]; any dtype,
    contiguous or not. One all-gather. In backward each rank has the gradient of what it alone
    computed from all tokens: one reduce-scatter sums them, and leaves this rank's tokens of the
    sum. It needs nothing of x, which is not kept. x and the gradient that arrives keep their
    values.
    """
    raise NotImplementedError("gather_tokens")


def scatter_sum(x: Tensor, group: Group) -> Tensor:
    """The conjugate of gather_tokens, where partial sums leave split layers: this rank's tokens
    of the ranks' sum.

    x [B, T, C], T a multiple of N -> [B, T/N, C], by one reduce-scatter; backward is one
    all-gather. The rest is as of gather_tokens.
    """
    raise NotImplementedError("scatter_sum")


def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor, group: Group) -> Tensor:
    """F.linear(gather_tokens(x, group), weight, bias), which does not keep all tokens for
    backward.

    x [B, T/N, K], weight [M/N, K], bias [M/N] -> [B, T, M/N]. The gradient of the weight needs
    all tokens of x; kept is x alone, and backward gathers them once more: two all-gathers and
    one reduce-scatter in all (Korthikanti et al. 2022, section 4.2.2). A frozen weight needs no
    tokens: then x is not kept, and backward does not gather. It is an autograd.Function.
    """
    raise NotImplementedError("gathered_linear")


def dropout_seed(
    seed: int,
    place: str,
    data: int,
    tensor: int,
    tensor_ranks: int,
    sequence: bool,
) -> int:
    """The seed of the generator that dropout draws from at a place, on the rank (data, tensor)
    of a mesh.

    place "inside": between a column layer and its row layer, as on attention's scores. There
    each rank of a tensor group has other heads or features, and must drop by other numbers.
    place "outside": on the residual stream. There the ranks of a tensor group hold the same
    tensor and must drop the same elements; but with `sequence` (parallelism) each has other
    tokens. Ranks with another `data` see other samples: their numbers are others everywhere.

    tensor: 0 to tensor_ranks - 1; data: 0 and up. Two generators get one seed only if they must
    draw the same numbers, so for "outside" and "inside" of one rank it is never the same. At
    least `seed`, below 2**63, and the same each time.
    """
    raise NotImplementedError("dropout_seed")
