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
    raise NotImplementedError("average_gradients")


def token_mean_loss(group: Group, loss_sum: Tensor, tokens: int) -> Tensor:
    """The loss to call backward on, when ranks hold different numbers of tokens and gradients
    are averaged over ranks.

    loss_sum [] is the sum of this rank's losses, one a token; `tokens` may be 0 on some ranks.
    The averaged gradients must be those of the mean over all tokens of all ranks; where no rank
    has any, zeros. One all-reduce of one number.
    Example: 1 token on rank 0 and 3 on rank 1: each token weighs 1/4, not 1/2 and 1/6.
    """
    raise NotImplementedError("token_mean_loss")


def assign_buckets(params: Sequence[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Parameters, less the frozen ones, in buckets, in the order in which backward completes
    them.

    Backward reaches parameters from the last to the first. A bucket holds at most `limit`
    elements, or one parameter that is larger alone. Fill a bucket until the next parameter does
    not fit, then begin another.
    Example: sizes [4, 3, 9, 2], limit 6 -> sizes [[2], [9], [3], [4]]; limit 7 -> [[2], [9],
    [3, 4]].
    """
    raise NotImplementedError("assign_buckets")


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
        raise NotImplementedError("Ddp.__init__")

    def on_gradient(self, p: nn.Parameter) -> None:
        """Runs inside backward, when p.grad is complete: launch the buckets that are full now,
        in order.
        """
        raise NotImplementedError("Ddp.on_gradient")

    def launch(self) -> None:
        """Start the all-reduce of the next bucket, and do not wait for it."""
        raise NotImplementedError("Ddp.launch")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients only add up on this rank: nothing is sent.

        Over with the block, also after an exception.
        """
        raise NotImplementedError("Ddp.no_sync")

    def finish(self) -> None:
        """After backward: launch what never filled, wait for all, put the means into .grad."""
        raise NotImplementedError("Ddp.finish")
