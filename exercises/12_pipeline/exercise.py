"""Chapter 12, pipelines: layers dealt out to ranks in stages, micro-batches passed from stage
to stage.

A stage is a run of layers. An operation is a tuple (kind, stage, micro-batch):

    ("F", 2, 0)   forward of stage 2 for micro-batch 0: needs F of stage 1, and stage 3 needs it
    ("B", 2, 0)   backward: needs its own F, and B (or I) of stage 3
    ("I", 2, 0)   backward's input half alone, in the place of a B: what stage 1 waits for
    ("W", 2, 0)   backward's weight half: needs its own I, and nobody waits for it

p ranks, numbered as the stages are; m micro-batches; a schedule is a list of operations for
each rank, in order.

`group` is a refimpl Group: `group.rank`, `group.size`, and

    group.send(x, to, async_op=True)      # begins; returns a work, and its wait() ends when
                                          # x has been received
    group.recv(x, source)                 # fills x
    group.send_recv(x, to, out, source)   # both at once: two ranks may call it with each other
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from refimpl.comm.group import Group

Op = tuple[str, int, int]
Later = Callable[[], None]


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Op]:
    """1F1B, the order of one stage: some forwards ahead, then one forward and one backward by
    turns, then backwards.

    Ahead are as many forwards as there are stages behind this one. Micro-batches are in order,
    forward and backward. So at most stages - stage micro-batches are between their forward and
    their backward; the bubble is GPipe's. Any number of micro-batches, also fewer than stages.
    Example: one_f_one_b(1, 3, 3) -> F0 F1 B0 F2 B1 B2, each as ("F", 1, 0) and so on.
    """
    raise NotImplementedError("one_f_one_b")


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Op]:
    """Interleaved 1F1B, the order of one rank, which holds `chunks` stages: chunk c is stage
    c * ranks + rank.

    Micro-batches go in groups of `ranks`. Forwards: a group passes chunk 0, 1, ..., then the
    next group. Backwards: the same with the chunks from the last to the first. Ahead are
    (chunks - 1) * ranks + 2 * (ranks - 1 - rank) forwards, then one forward and one backward by
    turns, then the backwards that are left. If micro_batches is no multiple of ranks, make the
    order of the next multiple and leave out those too many.
    Example: interleaved(0, 2, 2, 2) -> F of stage 0 for micro-batches 0, 1, of stage 2 for 0,
    1, then B of stage 2 for 0, 1, of stage 0 for 0, 1. Rank 1 begins to take turns earlier.
    """
    raise NotImplementedError("interleaved")


def zb_h1(order: Sequence[Op], late: int) -> list[Op]:
    """A stage's order with its backwards split: each B becomes an I in its place, and a W
    `late` micro-batches later.

    That is, the W of micro-batch k stands right behind the I of micro-batch k + late; the last
    `late` of them at the end. Each W once, in the order of the micro-batches, which may be
    fewer than `late`. (ZB-H1 is this, with 1F1B's order of stage s and late = s.)
    Example, one_f_one_b(1, 3, 3) and late = 1: F0 F1 I0 F2 I1 W0 I2 W1 W2.
    """
    raise NotImplementedError("zb_h1")


def play(
    orders: Sequence[Sequence[Op]], seconds: Mapping[str, float]
) -> dict[Op, tuple[float, float]]:
    """The simulated clock: (begin, end) of every operation, if each begins as soon as it can.

    orders: of each rank; a rank may hold several stages, and any. seconds: of each kind, such
    as {"F": 1, "B": 2}. An operation begins when the one before it on its rank has ended, and
    all that it needs has; messages take no time. The last stage is the largest number in
    `orders`: its backward needs its own forward only. ValueError if ranks wait for each other
    for ever, or for what nobody computes: the text names each rank that is not at its end, as
    "rank 1". Where there are no operations the result is empty.
    Example: play([[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0), ("B", 1, 0)]], {"F": 1, "B": 2})
    begins with F of stage 0 at (0, 1) and ends with B of stage 0 at (4, 6).
    """
    raise NotImplementedError("play")


def balanced(weights: Sequence[float], stages: int) -> list[int]:
    """Cut a chain of layers into stages whose largest sum of weights is as small as it can be,
    exactly.

    Returns stages + 1 bounds: stage s has the layers bounds[s] to bounds[s + 1] - 1. Every
    stage has a layer at least; there are enough. Of several best cuts any will do. 200 layers
    and 16 stages must take a second, not a lifetime.
    Weights are not below 0: parameters, seconds, any number.
    Example: balanced([5, 1, 1, 1, 1, 5], 3) -> [0, 1, 5, 6]: sums 5, 4, 5, where two layers
    each make 6, 2, 6.
    """
    raise NotImplementedError("balanced")


class Stage:
    """One stage on this rank, number group.rank of group.size, and what it does at each tick of
    a schedule.

    stage = Stage(module, group, loss, like)
    stage.forward(0, inputs, target); stage.forward(1, ...); stage.backward(0, scale); ...
    stage.finish()

    `like` has the shape and dtype of every activation between stages. Between a micro-batch's
    forward and backward its input stays, and what autograd saves; the output's values do not,
    only its place in the graph:

        edge = get_gradient_edge(out)             # of torch.autograd.graph; keeps no values
        torch.autograd.backward(edge, gradient)   # as out.backward(gradient)
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        loss: Callable[[Tensor, Any], Tensor],
        like: Tensor,
    ) -> None:  # given
        self.module, self.group, self.loss, self.like = module, group, loss, like
        self.kept: dict[int, Any] = {}  # micro-batch -> what its backward needs
        self.sending: dict[int, Any] = {}  # neighbour -> the send to it that was begun last

    def forward(
        self, micro: int, inputs: Tensor | None = None, target: Any = None
    ) -> Tensor | None:
        """Get the input from the stage before (stage 0 is given `inputs`), compute, send the
        output to the next stage.

        The last stage computes loss(output, target), and returns it, detached; the others
        return None.
        """
        raise NotImplementedError("Stage.forward")

    def backward(self, micro: int, scale: float) -> None:
        """Get the output's gradient from the next stage (the last one begins with `scale` times
        its loss), go backward, send the input's gradient to the stage before. Nothing of the
        micro-batch stays but the parameters' `.grad`.
        """
        raise NotImplementedError("Stage.backward")

    def send(self, x: Tensor, to: int) -> None:
        """Begin to send x, which need not be contiguous, and return: two stages that send to
        each other must not stand.

        At most one send to each neighbour is under way: the one before is waited for first.
        """
        raise NotImplementedError("Stage.send")

    def finish(self) -> None:
        """Wait for the sends under way, and let go of them.

        Called after the last tick of a step.
        """
        raise NotImplementedError("Stage.finish")


def tied_gradients(group: Group, ranks: Sequence[int], params: Sequence[nn.Parameter]) -> None:
    """Sum the gradients of weights that several stages share: each of `ranks` has a copy of
    every parameter.

    Called on all ranks of the group, after the last micro-batch; one that is not among `ranks`
    does nothing, and its params are left alone. params: in the same order everywhere, of one
    dtype. Each copy's `.grad` becomes the sum over `ranks`, added in the order of that list, so
    that all have the same bits; a `.grad` of None counts as zeros. Each is memory of its own,
    no view of more.
    Sent: to each other of `ranks` this rank's gradients once, in one message, in their dtype.
    """
    raise NotImplementedError("tied_gradients")


def split_linear(x: Tensor, weight: Tensor, bias: Tensor, later: list[Later]) -> Tensor:
    """x @ weight.T + bias, [..., i] -> [..., o], whose backward computes the gradient of x
    alone.

    Its weight half is put off: backward appends to `later` a function that adds the gradients
    to weight.grad [o, i] and bias.grad [o], which may be None before, and which have no graph,
    like those that autograd makes. Each function is called once, in any order and at any time,
    and lets go of all it has kept afterwards. Until then x and the gradient are kept, as they
    are, and no copies. Write a torch.autograd.Function that is applied to x, weight and bias,
    so that autograd calls it also where x needs no gradient; then no gradient of x is
    computed. If weight and bias are frozen, nothing is put off.
    """
    raise NotImplementedError("split_linear")
