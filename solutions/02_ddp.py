"""Chapter 02, data parallel: every rank computes its own gradients, then all take their mean,
while backward runs.

`group` is a refimpl Group: `group.rank`, `group.size`, and

    group.broadcast(x, root=0)                          # x of the root on every rank
    group.all_reduce(x, "sum" | "mean") -> work         # in place, x contiguous
    group.all_reduce(x, "mean", async_op=True) -> work  # returns at once; x must rest
                                                        # until work.wait()

A parameter that requires no gradient is frozen: it is not reduced. A parameter whose `.grad` is
None was not used by this rank; other ranks may have used it, so its gradient counts as zero.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.comm.work import Work


def average_gradients(group: Group, params: Sequence[nn.Parameter]) -> None:
    """After backward: replace the gradient of each parameter that is not frozen by its mean
    over ranks.

    One all-reduce of one flat buffer, whatever the number of parameters: 2n(N - 1)/N elements
    sent, in the dtype of the gradients, which is one for all. Gradients need not be contiguous.
    No second copy of them may stay.
    """
    trained = [p for p in params if p.requires_grad]
    flat = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in trained]
    )
    group.all_reduce(flat, "mean")
    for p, piece in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad = piece.view_as(p)


def token_mean_loss(group: Group, loss_sum: Tensor, tokens: int) -> Tensor:
    """The loss to call backward on, when ranks hold different numbers of tokens and gradients
    are averaged over ranks.

    loss_sum [] is the sum of this rank's losses, one a token; `tokens` may be 0 on some ranks.
    The averaged gradients must be those of the mean over all tokens of all ranks; where no rank
    has any, zeros. One all-reduce of one number.
    Example: 1 token on rank 0 and 3 on rank 1: each token weighs 1/4, not 1/2 and 1/6.
    """
    total = torch.tensor([float(tokens)])
    group.all_reduce(total)
    return loss_sum * (group.size / max(1.0, total.item()))


def assign_buckets(params: Sequence[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Parameters, less the frozen ones, in buckets, in the order in which backward completes
    them.

    Backward reaches parameters from the last to the first. A bucket holds at most `limit`
    elements, or one parameter that is larger alone. Fill a bucket until the next parameter does
    not fit, then begin another.
    Example: sizes [4, 3, 9, 2], limit 6 -> sizes [[2], [9], [3], [4]]; limit 7 -> [[2], [9],
    [3, 4]].
    """
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for p in reversed(params):
        if not p.requires_grad:
            continue
        if not buckets or p.numel() > room:
            buckets.append([])
            room = limit
        buckets[-1].append(p)
        room -= p.numel()
    return buckets


class Ddp:
    """Data parallel around a model: gradients travel in buckets while backward still computes.

        ddp = Ddp(model, group, limit=1000)
        with ddp.no_sync():
            model(first).backward()      # this micro-batch only adds to .grad
        model(last).backward()           # the hooks start one all-reduce a bucket
        ddp.finish()                     # every .grad is the mean over ranks
        optimizer.step()

    Every rank must launch the same buckets in the same order, also if it left some parameters
    unused. Traffic a step: one all-reduce a bucket, in the gradients' dtype, however many
    micro-batches. After finish() no second copy of the gradients stays. Backward runs the hooks
    in the order gradients are complete.
    """

    def __init__(self, model: nn.Module, group: Group, limit: int) -> None:
        """Give all ranks rank 0's parameters and buffers; put a hook on every parameter that is
        not frozen.
        """
        self.group = group
        for tensor in [*model.parameters(), *model.buffers()]:
            group.broadcast(tensor.data)
        self.buckets = assign_buckets(list(model.parameters()), limit)
        self.syncing = True
        self.ready: set[nn.Parameter] = set()  # whose gradient of this backward is complete
        self.flights: list[tuple[Work, Tensor]] = []  # launched, in the order of the buckets
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, p: nn.Parameter) -> None:
        """Runs inside backward, when p.grad is complete: launch the buckets that are full now,
        in order.
        """
        if not self.syncing:
            return
        self.ready.add(p)
        while len(self.flights) < len(self.buckets) and self.ready.issuperset(
            self.buckets[len(self.flights)]
        ):
            self.launch()

    def launch(self) -> None:
        """Start the all-reduce of the next bucket, and do not wait for it."""
        bucket = self.buckets[len(self.flights)]
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket]
        )
        self.flights.append((self.group.all_reduce(flat, "mean", async_op=True), flat))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients only add up on this rank: nothing is sent.

        Over with the block, also after an exception.
        """
        self.syncing = False
        try:
            yield
        finally:
            self.syncing = True

    def finish(self) -> None:
        """After backward: launch what never filled, wait for all, put the means into .grad."""
        while len(self.flights) < len(self.buckets):
            self.launch()
        for bucket, (work, flat) in zip(self.buckets, self.flights, strict=True):
            work.wait()
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = piece.view_as(p)
        self.ready.clear()
        self.flights.clear()


HINTS = {
    "average_gradients": [
        "All ranks must call the same all_reduce with the same number of elements: decide by requires_grad, which is "
        "the same everywhere, and not by .grad, which may be None on some ranks only.",
        "torch.cat of flattened gradients makes the buffer. A transposed gradient cannot be viewed as flat: reshape.",
        "After the all_reduce, flat.split(sizes) gives the pieces back: view each as its parameter's shape.",
    ],
    "token_mean_loss": [
        "Write down the gradient you want: the sum over all tokens of all ranks, divided by their number T.",
        "The mean over ranks divides the sum of your losses by N. What must each loss be multiplied by?",
        "N / T, where T is the all-reduced number of tokens.",
    ],
    "assign_buckets": [
        "Walk the parameters from the last to the first, and skip the frozen ones.",
        "Keep count of the room that is left in the current bucket.",
        "A parameter larger than the limit gets a new bucket like any other that does not fit; then no room is left.",
    ],
    "Ddp": [
        "__init__: p.register_post_accumulate_grad_hook(fn) calls fn(p) inside backward, when p.grad is complete.",
        "on_gradient: remember p. While the next bucket in order has all its parameters, launch it.",
        "launch: copy the bucket's gradients into one flat buffer, all_reduce it with async_op=True, and keep both.",
        "finish: a bucket with a parameter that this rank never used is still waiting: launch it with zeros.",
        "no_sync: a generator with @contextmanager that sets a flag, yields, and resets it in `finally`.",
    ],
}
