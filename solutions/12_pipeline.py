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
    forwards = [("F", stage, k) for k in range(micro_batches)]
    ahead = stages - 1 - stage
    order = forwards[:ahead]
    for k in range(micro_batches):
        order += [*forwards[ahead + k : ahead + k + 1], ("B", stage, k)]
    return order


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
    groups = range(0, micro_batches, ranks)
    passes = [(c, k) for g in groups for c in range(chunks) for k in range(g, g + ranks)]
    forwards = [("F", c * ranks + rank, k) for c, k in passes]
    backwards = [("B", (chunks - 1 - c) * ranks + rank, k) for c, k in passes]
    ahead = (chunks - 1) * ranks + 2 * (ranks - 1 - rank)
    order = forwards[:ahead]
    for i, backward in enumerate(backwards):
        order += [*forwards[ahead + i : ahead + i + 1], backward]
    return [op for op in order if op[2] < micro_batches]


def zb_h1(order: Sequence[Op], late: int) -> list[Op]:
    """A stage's order with its backwards split: each B becomes an I in its place, and a W
    `late` micro-batches later.

    That is, the W of micro-batch k stands right behind the I of micro-batch k + late; the last
    `late` of them at the end. Each W once, in the order of the micro-batches, which may be
    fewer than `late`. (ZB-H1 is this, with 1F1B's order of stage s and late = s.)
    Example, one_f_one_b(1, 3, 3) and late = 1: F0 F1 I0 F2 I1 W0 I2 W1 W2.
    """
    result: list[Op] = []
    waiting: list[Op] = []
    for kind, stage, k in order:
        if kind != "B":
            result.append((kind, stage, k))
            continue
        result.append(("I", stage, k))
        waiting.append(("W", stage, k))
        if len(waiting) > late:
            result.append(waiting.pop(0))
    return result + waiting


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
    last = max((stage for order in orders for _, stage, _ in order), default=0)
    spans: dict[Op, tuple[float, float]] = {}
    left = [list(reversed(order)) for order in orders]
    free = [0.0] * len(orders)
    while any(left):
        moved = False
        for rank, ops in enumerate(left):
            while ops and (comes := _ready(ops[-1], spans, last)) is not None:
                op = ops.pop()
                begin = max([free[rank], *comes])
                free[rank] = begin + seconds[op[0]]
                spans[op], moved = (begin, free[rank]), True
        if not moved:
            stuck = [
                f"rank {rank} waits to compute {ops[-1]}"
                for rank, ops in enumerate(left)
                if ops
            ]
            raise ValueError(f"nobody goes on: {', '.join(stuck)}")
    return spans


def _ready(op: Op, spans: Mapping[Op, tuple[float, float]], last: int) -> list[float] | None:
    """When what it needs ends; None if something is not done yet."""
    kind, stage, k = op
    needs: list[tuple[Op, ...]] = []  # of each, one of these
    if kind == "F" and stage > 0:
        needs = [(("F", stage - 1, k),)]
    if kind == "W":
        needs = [(("I", stage, k),)]
    if kind in "BI":
        needs = [(("F", stage, k),)]
        needs += [(("B", stage + 1, k), ("I", stage + 1, k))] if stage < last else []
    ends = [[spans[other][1] for other in either if other in spans] for either in needs]
    return [found[0] for found in ends] if all(ends) else None


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
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # So many layers -> their best cut so far.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for stage in range(1, stages + 1):
        best = {
            end: min(
                (max(largest, sums[end] - sums[begin]), [*bounds, end])
                for begin, (largest, bounds) in best.items()
                if begin < end
            )
            for end in range(stage, len(weights) + 1)
        }
    return best[len(weights)][1]


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
        group, is_last = self.group, self.group.rank == self.group.size - 1
        if group.rank > 0:
            inputs = torch.empty_like(self.like)
            group.recv(inputs, group.rank - 1)
            inputs.requires_grad_()
        out = self.module(inputs)
        if is_last:
            out = self.loss(out, target)
        result = out.detach() if is_last else None
        self.kept[micro] = inputs, get_gradient_edge(out), result
        if not is_last:
            self.send(out.detach(), group.rank + 1)
        return result

    def backward(self, micro: int, scale: float) -> None:
        """Get the output's gradient from the next stage (the last one begins with `scale` times
        its loss), go backward, send the input's gradient to the stage before. Nothing of the
        micro-batch stays but the parameters' `.grad`.
        """
        inputs, edge, result = self.kept.pop(micro)
        if result is not None:
            gradient = torch.full_like(result, scale)
        else:
            gradient = torch.empty_like(self.like)
            self.group.recv(gradient, self.group.rank + 1)
        torch.autograd.backward(edge, gradient)
        if self.group.rank > 0:
            self.send(inputs.grad, self.group.rank - 1)

    def send(self, x: Tensor, to: int) -> None:
        """Begin to send x, which need not be contiguous, and return: two stages that send to
        each other must not stand.

        At most one send to each neighbour is under way: the one before is waited for first.
        """
        if to in self.sending:
            self.sending.pop(to).wait()
        self.sending[to] = self.group.send(x.contiguous(), to, async_op=True)

    def finish(self) -> None:
        """Wait for the sends under way, and let go of them.

        Called after the last tick of a step.
        """
        for work in self.sending.values():
            work.wait()
        self.sending.clear()


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
    if group.rank not in ranks:
        return
    mine = torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in params]
    )
    total = torch.zeros_like(mine)
    for rank in ranks:
        theirs = mine
        if rank != group.rank:
            theirs = torch.empty_like(mine)
            group.send_recv(mine, rank, theirs, rank)
        total += theirs
    for p, grad in zip(params, total.split([p.numel() for p in params]), strict=True):  # type: ignore[no-untyped-call]
        p.grad = grad.view_as(p).clone()


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

    class Split(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x @ weight.T + bias

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            held = [grad.reshape(-1, grad.shape[-1]), x.detach().reshape(-1, x.shape[-1])]

            def weight_half() -> None:
                grad, x = held
                held.clear()
                for p, more in ((weight, lambda: grad.T @ x), (bias, lambda: grad.sum(0))):
                    if p.requires_grad:
                        p.grad = more() if p.grad is None else p.grad + more()

            if weight.requires_grad or bias.requires_grad:
                later.append(weight_half)
            return grad @ weight.detach() if ctx.needs_input_grad[0] else None, None, None

    return Split.apply(x, weight, bias)  # type: ignore[no-untyped-call]


HINTS = {
    "one_f_one_b": [
        "Write all forwards in a list first. How many stages are behind stage s of p? So many forwards come first.",
        "Then for each backward k: the forward number ahead + k, if there is one, and the backward. A slice "
        "forwards[i : i + 1] is empty where there is none.",
    ],
    "interleaved": [
        "Make two lists of the same length, all forwards and all backwards of the rank, then take turns as in 1F1B.",
        "For each group of `ranks` micro-batches, for each chunk, for each of the group: (chunk, micro-batch).",
        "The backwards visit chunk chunks - 1 - c where the forwards visit chunk c. At the end drop micro-batches that "
        "there are not.",
    ],
    "zb_h1": [
        "Walk along the order with a list of weight halves that wait.",
        "At a B append the I, let its W wait, and if more than `late` wait, append the oldest. At the end all of them.",
    ],
    "play": [
        "Keep of each rank what is left of its order, and when it is free. Go round over the ranks until all are done.",
        "A rank may go on while its next operation's needs are all among the spans. begin = max(free, their ends).",
        "A round in which no rank has moved is a deadlock: say for each rank with something left what it waits for.",
        "The backward of stage s needs (F, s, k), and if s is not the last, (B, s + 1, k) or (I, s + 1, k).",
    ],
    "balanced": [
        "The best cut of the first n layers into k stages: where does its last stage begin? Try every place.",
        "best(k, n) = min over b < n of max(best(k - 1, b), sum of layers b to n - 1). Prefix sums make each sum one "
        "subtraction. Remember the bounds beside the value.",
    ],
    "Stage": [
        "forward: recv into torch.empty_like(self.like), then requires_grad_(): a leaf, whose .grad is sent back.",
        "Keep the input and get_gradient_edge(out), not out. Send out.detach().",
        "backward: pop what was kept; the gradient is received, or on the last stage torch.full_like(the loss, scale). "
        "torch.autograd.backward(edge, gradient), then send inputs.grad.",
        "send: if there is one to this neighbour in self.sending, wait for it. group.send(..., async_op=True) returns "
        "the work to keep. finish waits for all.",
    ],
    "tied_gradients": [
        "Flatten all gradients into one tensor: zeros for None. Exchange it with each other holder by send_recv.",
        "Add in the order of `ranks`, your own where your rank comes: then every holder adds in the same order.",
        "Split the sum again and give each parameter its part, in memory of its own.",
    ],
    "split_linear": [
        "Define the Function inside, so that its backward sees `later`, `weight` and `bias`.",
        "With rows of x flattened to [n, i] and of the gradient to [n, o]: dx = g @ W, dW = g.T @ x, db = g.sum(0).",
        "backward returns (dx or None, None, None); autograd adds nothing to weight.grad then, your function does.",
        "x as it was saved still requires a gradient: detach it. Hold both in a list, and clear that when the function "
        "runs.",
    ],
}
