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

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return _total(grad, group)

    return Enter.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def leave(x: Tensor, group: Group) -> Tensor:
    """Where partial sums leave split layers: the sum of all ranks' x, equal on all.

    Megatron-LM calls it g. One all-reduce in forward; x keeps its values, is of any shape and
    dtype, contiguous or not. Backward sends nothing: what comes after is computed alike on
    every rank, so the gradient that arrives is equal on all of them, and whole.
    """

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return _total(x, group)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    return Leave.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def _total(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total)
    return total


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
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(_part(plain.weight, 0, group), plain.weight.requires_grad)
        self.bias = None
        if plain.bias is not None:
            self.bias = nn.Parameter(_part(plain.bias, 0, group), plain.bias.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., K] -> [.., M/N]. Sends nothing; backward sends the gradient of x, once."""
        return F.linear(enter(x, self.group), self.weight, self.bias)


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
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(_part(plain.weight, 1, group), plain.weight.requires_grad)
        self.bias = None
        if plain.bias is not None:
            self.bias = nn.Parameter(plain.bias.detach().clone(), plain.bias.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., K/N] -> [.., M]. Sends the partial sums, once; backward sends nothing."""
        y = leave(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


def _part(whole: Tensor, dim: int, group: Group) -> Tensor:
    if whole.shape[dim] % group.size:
        raise ValueError(
            f"{whole.shape[dim]} features cannot be dealt to {group.size} ranks equally"
        )
    return (
        whole.detach()
        .chunk(group.size, dim)[group.rank]
        .clone(memory_format=torch.contiguous_format)
    )


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
    if kv_heads % ranks:
        raise ValueError(
            f"{kv_heads} heads of keys and values cannot be dealt to {ranks} ranks equally"
        )
    d = whole.shape[0] // (heads + 2 * kv_heads)
    blocks = whole.detach().split([heads * d, kv_heads * d, kv_heads * d])  # type: ignore[no-untyped-call]
    return torch.cat([block.chunk(ranks)[rank] for block in blocks])


def vocab_embedding(ids: Tensor, part: Tensor, first: int, group: Group) -> Tensor:
    """F.embedding(ids, table), of which each rank has some rows: part [v, C], rows first to
    first + v - 1 of V.

    ids [..] int64, equal on all ranks, 0 to V - 1 -> [.., C], equal on all ranks, in the
    table's dtype. v is not the same on all ranks. Each rank looks up what it has, and gives
    zeros for the other tokens; one all-reduce of the result. Backward sends nothing, and
    part.grad gets a gradient for its own tokens alone. ids keeps its values.
    """
    elsewhere = (ids < first) | (ids >= first + len(part))
    rows = F.embedding((ids - first).masked_fill(elsewhere, 0), part)
    return leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0), group)


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

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            top = logits.amax(1).float()
            group.all_reduce(top, op="max")
            z = logits.float() - top.unsqueeze(1)
            counts = targets != ignore_index
            here = counts & (targets >= first) & (targets < first + logits.shape[1])
            place = (targets - first).masked_fill(~here, 0).unsqueeze(1)
            sums = torch.stack(
                [z.gather(1, place).squeeze(1) * here, z.exp_().sum(1)]
            )  # [2, n]
            group.all_reduce(sums)
            target, total = sums
            ctx.save_for_backward(z.div_(total.unsqueeze(1)), place, here, counts)
            ctx.dtype = logits.dtype
            return ((total.log() - target) * counts).sum() / counts.sum().clamp(min=1)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            z, place, here, counts = ctx.saved_tensors
            scale = (grad * counts / counts.sum().clamp(min=1)).unsqueeze(1)  # [n, 1]
            out = z * scale
            out.scatter_add_(1, place, -scale * here.unsqueeze(1))
            return out.to(ctx.dtype)

    return Loss.apply(logits)  # type: ignore[no-any-return,no-untyped-call]


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Sequence parallelism: this rank's tokens -> all tokens, where they enter split layers.

    x [B, T/N, C]: rank r has the r-th of N equal runs of each sequence -> [B, T, C]; any dtype,
    contiguous or not. One all-gather. In backward each rank has the gradient of what it alone
    computed from all tokens: one reduce-scatter sums them, and leaves this rank's tokens of the
    sum. It needs nothing of x, which is not kept. x and the gradient that arrives keep their
    values.
    """
    return _exchange(x, group, _all_tokens, _own_tokens)


def scatter_sum(x: Tensor, group: Group) -> Tensor:
    """The conjugate of gather_tokens, where partial sums leave split layers: this rank's tokens
    of the ranks' sum.

    x [B, T, C], T a multiple of N -> [B, T/N, C], by one reduce-scatter; backward is one
    all-gather. The rest is as of gather_tokens.
    """
    return _exchange(x, group, _own_tokens, _all_tokens)


def _exchange(
    x: Tensor,
    group: Group,
    there: Callable[[Tensor, Group], Tensor],
    back: Callable[[Tensor, Group], Tensor],
) -> Tensor:
    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return there(x, group)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return back(grad, group)

    return Exchange.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def _all_tokens(x: Tensor, group: Group) -> Tensor:
    out = x.new_empty(group.size, *x.shape)  # [N, B, T/N, C]
    group.all_gather(out, x.contiguous())
    return out.transpose(0, 1).flatten(1, 2)


def _own_tokens(x: Tensor, group: Group) -> Tensor:
    runs = torch.stack(x.chunk(group.size, 1))  # [N, B, T/N, C]
    mine = torch.empty_like(runs[0])
    group.reduce_scatter(mine, runs)
    return mine


def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor, group: Group) -> Tensor:
    """F.linear(gather_tokens(x, group), weight, bias), which does not keep all tokens for
    backward.

    x [B, T/N, K], weight [M/N, K], bias [M/N] -> [B, T, M/N]. The gradient of the weight needs
    all tokens of x; kept is x alone, and backward gathers them once more: two all-gathers and
    one reduce-scatter in all (Korthikanti et al. 2022, section 4.2.2). A frozen weight needs no
    tokens: then x is not kept, and backward does not gather. It is an autograd.Function.
    """

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
            return F.linear(_all_tokens(x, group), weight, bias)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
            x, weight = ctx.saved_tensors
            rows = grad.flatten(0, 1)
            of_weight = None
            if ctx.needs_input_grad[1]:
                of_weight = rows.t() @ _all_tokens(x, group).flatten(0, 1)
            return _own_tokens(grad @ weight, group), of_weight, rows.sum(0)

    return Gathered.apply(x, weight, bias)  # type: ignore[no-any-return,no-untyped-call]


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
    stream = 1 + tensor if place == "inside" else tensor_ranks + 1 + tensor if sequence else 0
    return seed + data * (2 * tensor_ranks + 1) + stream


HINTS = {
    "enter": [
        "Define the class inside the function: its static methods then see group. Return x.view_as(x).",
        "x went to N places, so its gradient is the sum of what comes back from N places.",
        "backward: total = grad.clone(memory_format=torch.contiguous_format); group.all_reduce(total); return total.",
    ],
    "leave": [
        "The mirror image of enter: the sum is in forward. Sum a contiguous copy: x is somebody else's.",
        "Every rank goes on with the same sum, computes the same loss, and gets the same gradient: hand it on.",
    ],
    "ColumnLinear": [
        "nn.Linear's weight is [M, K]: outputs are its first dimension, whatever the word column says.",
        "plain.weight.detach().chunk(N)[rank].clone(): a chunk alone is a view that keeps the whole alive.",
        "forward: F.linear(enter(x, self.group), self.weight, self.bias). The bias is cut like the outputs.",
    ],
    "RowLinear": [
        "The inputs are the weight's second dimension.",
        "A bias that each rank adds before the sum is added N times: leave(F.linear(x, weight)) + bias.",
        "register the bias whole; self.bias = None where there is none.",
    ],
    "cut_qkv": [
        "Three matrices lie in one. Cut each of them by itself.",
        "split([heads * d, kv_heads * d, kv_heads * d]), chunk each into N, cat this rank's chunks.",
    ],
    "vocab_embedding": [
        "A mask: which tokens are elsewhere? Look up row 0 for those, then overwrite what came with zeros.",
        "masked_fill of the result also stops the gradient of the wrong rows. Sum by leave.",
    ],
    "vocab_cross_entropy": [
        "Forward: row maximum, all-reduce max; subtract; the target's logit if it is here; exp, sum; all-reduce.",
        "An ignored target is not a place: mask it before you gather. Divide the sum by how many rows count.",
        "Keep the probabilities, exp(z - m) / sum, made in place in the fp32 copy. Backward: probabilities times "
        "grad / count in a new tensor, and that scale taken off at the target's place.",
    ],
    "gather_tokens": [
        "all_gather lays the ranks' tensors one behind the other: [N, B, T/N, C]. Which dimension must move where?",
        "out.transpose(0, 1).flatten(1, 2). Backward: stack the N runs of tokens of the gradient, reduce_scatter.",
    ],
    "scatter_sum": [
        "torch.stack(x.chunk(N, dim=1)) lays run r where reduce_scatter takes rank r's chunk from.",
        "Its backward is gather_tokens' forward.",
    ],
    "gathered_linear": [
        "save_for_backward(x, weight), and gather inside forward: nothing is recorded there.",
        "The gradient of x: grad @ weight, all tokens, summed and scattered. Of the weight: grad^T times all tokens.",
        "ctx.needs_input_grad[1] tells whether the weight's gradient is wanted.",
    ],
    "dropout_seed": [
        "How many streams does one tensor group need? One in common, one a rank inside, one a rank outside.",
        "Number the streams of a group from 0; a group with another `data` begins where the one before ends.",
    ],
}
