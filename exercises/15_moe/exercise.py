"""Chapter 15, mixture of experts: a gate sends each token to k of E experts, which live on
different ranks.

    T   tokens of this rank     k   experts that a token goes to
    E   experts, of all ranks   R   rows for experts: the routes that are kept, at most k T
    M   width of a token        N   ranks: rank r has the E/N experts that begin at r E/N

Route t k + j is the j-th expert of token t. `group` is a refimpl Group: `group.rank`,
`group.size` (N), and, for contiguous tensors of any dtype that need no gradient,

    group.all_reduce(x)        # x becomes the ranks' sum; with op="max" their maximum
    group.all_to_all(out, x)   # x [N*s] -> out [N*s]: rank i's chunk for this rank becomes
                               # out's i-th chunk
    group.all_to_all(out, x, out_splits=[..], in_splits=[..])   # chunks of as many rows: N ints

No collective is recorded by autograd. Ties go to the expert, or the token, that stands first.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.comm.group import Group


def top_k_gate(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k experts with the highest probabilities, and what their answers are multiplied with.

    logits [T, E], fp32 or bf16 -> (experts [T, k] int64, the best first; weights [T, k] fp32,
    with a gradient). The probabilities are a softmax over all E in fp32. For k > 1 a token's
    weights are divided by their sum, as in GShard and Mixtral. For k = 1 the weight is the
    probability itself, as in Switch: divided by itself it would be 1, and the gate would learn
    nothing. Of equal logits the expert with the lower number is taken (torch.topk takes any).
    Example: logits log([0.6, 0.1, 0.3]), k = 2 -> experts [0, 2], weights [2/3, 1/3]; k = 1 ->
    [0], [0.6].
    """
    raise NotImplementedError("top_k_gate")


def biased_gate(logits: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3's: the bias decides who is chosen, and has no part in the weights.

    logits [T, E], fp32 or bf16; bias [E] fp32 -> (experts [T, k] int64, the best first; weights
    [T, k] fp32). Scores are sigmoids in fp32. Chosen are the k highest of score + bias; the
    weights are their scores divided by the sum of these k (for k = 1 too: a 1). The weights
    have a gradient to the logits, none to the bias.
    Example: scores [0.5, 0.4, 0.1], bias [0, 0, 0.45], k = 2 -> experts [2, 0], weights
    [1/6, 5/6].
    """
    raise NotImplementedError("biased_gate")


def rebalance(bias: Tensor, counts: Tensor, rate: float, group: Group) -> None:
    """One step of balancing without a loss: bias [E] fp32 is changed in place, equally on all
    ranks.

    counts [E] int64: routes of this rank's tokens to each expert. An expert that had fewer than
    the mean of all E, on all ranks together, is raised by `rate`, one that had more is lowered
    by it, one that had the mean stays. One all-reduce of E int64 numbers. counts keeps its
    values. Compare whole numbers: they can be above 2^24.
    """
    raise NotImplementedError("rebalance")


def expert_choice(logits: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Each expert takes tokens, and not the other way: all have equally many, and a token has
    any number, or none.

    logits [T, E], fp32 or bf16 -> (tokens [E, C] int64, the best first; weights [E, C] fp32),
    C = capacity, or T where there are fewer tokens. The probabilities are those of each
    *token's* softmax over the experts, in fp32; expert e takes the C tokens with the highest
    probability of e. The weights are these probabilities, with a gradient.
    """
    raise NotImplementedError("expert_choice")


def positions(experts: Tensor, number: int, capacity: int) -> Tensor:
    """Each route's place in its expert's buffer of `capacity` places, or -1 where it is
    dropped.

    experts [T, k] int64, below `number`, or -1 for a token that goes nowhere (padding), which
    takes no place and gets -1 -> [T, k] int64. As in GShard: all first choices find their
    places before any second choice does, and so on; among equal choices tokens come in order.
    experts keeps its values. T is 10^5: no loop over tokens in Python, and nothing is made of
    more than k T x (number + 1) elements.
    Example: experts [[0, 1], [0, 1], [1, 0]], capacity 2 -> [[0, 1], [1, -1], [0, -1]].
    """
    raise NotImplementedError("positions")


def agreed_capacity(tokens: int, experts: int, k: int, factor: float, group: Group) -> int:
    """Places of an expert for the routes of one rank: ceil(factor k T / E), the same on all
    ranks.

    T is the largest number of tokens that any rank has: where the last batch is shorter on some
    rank, buffers of E x capacity rows would otherwise differ, and an all-to-all of equal chunks
    hangs or mixes them up. One all-reduce of a single int64. Example: 6 and 10 tokens, 4
    experts, k = 2, factor 1.25 -> 7 on both ranks.
    """
    raise NotImplementedError("agreed_capacity")


def balance_loss(logits: Tensor, experts: Tensor, group: Group) -> Tensor:
    """E sum over experts of f_e P_e: 1 where both are even, E where one expert gets everything.

    An fp32 scalar. logits [T, E], fp32 or bf16; experts [T, k] int64, as chosen, before
    anything is dropped.
    f_e: the share of expert e among the routes of *all* ranks; it has no gradient. P_e: the
    mean over this rank's tokens of their probability of e, a softmax in fp32; through it goes
    the gradient. One all-reduce of E int64 numbers. A rank without tokens takes part, and has
    loss 0, of which backward can be called all the same; never 0/0.
    """
    raise NotImplementedError("balance_loss")


def permute(x: Tensor, experts: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens laid out by expert: each expert's rows lie together, in the order of their routes.

    x [T, M] of any dtype; experts [T, k] int64, -1 for a route that is dropped -> (rows [R, M];
    routes [R] int64, the number t k + j of each row's route; counts [number] int64, rows of
    each). No multiplication by one-hot matrices: nothing that is made has more elements than
    the rows, or than k T x number. The gradient of a token is the sum over its rows. x keeps
    its values.
    Example: experts [[1, 0], [1, -1]] -> routes [1, 0, 2]: token 0 for expert 0, then tokens 0
    and 1 for expert 1.
    """
    raise NotImplementedError("permute")


def combine(answers: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
    """Back to tokens: the sum over a token's rows of weight x answer, added in fp32; zeros for
    one that has no row.

    answers [R, M], fp32 or bf16; routes [R] int64, as `permute` gave them; weights [T, k] fp32
    -> [T, M] in answers' dtype, with gradients to the answers and to the weights. Nothing that
    is made has more elements than the answers or the result. answers and weights keep their
    values.
    """
    raise NotImplementedError("combine")


def dispatch(rows: Tensor, counts: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Each row goes to the rank that has its expert, and nowhere else.

    rows [R, M] of any dtype, by expert, as `permute` laid them; counts [E] int64: how many are
    each expert's -> (arrived [R', M]: rank 0's rows for this rank's experts, in their order,
    then rank 1's, ...;
        sizes [N, E/N] int64: how many rank s sent to this rank's j-th expert).
    Two all-to-alls: E int64 numbers, then the rows in uneven parts. Backward sends each row's
    gradient back, by one all-to-all: it knows the numbers, and needs no rows to be kept. An
    expert may get nothing, a rank may have no tokens: it takes part all the same. rows and
    counts keep their values.
    """
    raise NotImplementedError("dispatch")


def give_back(answers: Tensor, counts: Tensor, sizes: Tensor, group: Group) -> Tensor:
    """The way back: each row returns to the rank, and to the place, that it came from.

    answers [R', M], the experts' answers to the rows that `dispatch` brought, in their order;
    counts and sizes as there -> [R, M], in the order of the rows that were sent. One
    all-to-all; backward is one more. Nothing else is sent: both sides know the numbers. The
    answers are not kept, and keep their values.
    """
    raise NotImplementedError("give_back")


def average_gradients(
    dense: Sequence[nn.Parameter], experts: Sequence[nn.Parameter], world: Group, same: Group
) -> None:
    """After backward: every gradient becomes the mean over the world's ranks of what their
    tokens gave it.

    dense: parameters that all ranks have. experts: those of this rank's experts, which the
    ranks of `same` have too, and no others. Each rank's loss is the mean over its own tokens.
    An expert's gradient already holds what the tokens of other ranks gave it: they came here. A
    parameter that requires a gradient and has None (no token came) counts as zeros, and has a
    gradient afterwards. Frozen ones are left out. A gradient need not be contiguous. Gradients
    are sent in their own dtype, those of experts over `same` alone.
    """
    raise NotImplementedError("average_gradients")


def two_level_all_to_all(x: Tensor, inner: Group, outer: Group) -> Tensor:
    """An all-to-all over nodes of equal size by two: inside each node, and between ranks with
    the same place in theirs, in either order.

    The world's rank is outer.rank * inner.size + inner.rank: `inner` are the ranks of this
    node, `outer` those with this place in every node. x [N, ...] of any dtype, row i for the
    world's rank i -> [N, ...], row i from rank i, as one all-to-all over all N ranks would give
    it. One all-to-all in each group, of as many bytes as x has. What leaves the node is as much
    as before, in outer.size - 1 messages of inner.size rows instead of N - inner.size of one
    row. x is contiguous, and keeps its values.
    """
    raise NotImplementedError("two_level_all_to_all")
