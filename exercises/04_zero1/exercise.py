"""Chapter 04, ZeRO-1: every rank updates only its own part of the parameters, and keeps
optimizer state for no more.

The parameters lie end to end in one buffer [P], and P is a multiple of the number of ranks N:
shard number r, S = P / N elements, belongs to rank r. Where a shard begins is a matter of
counting: it may be the middle of a matrix.

`group` is a refimpl Group: `group.rank`, `group.size`, and

    group.broadcast(x, root=0)            # x of the root on every rank
    group.reduce_scatter(out, x, "mean")  # x [P] on every rank -> out [S], the rank's shard
    group.all_gather(out, x)              # x [S] on every rank -> out [P]; x may lie in out
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn, optim

from refimpl.comm.group import Group


def flatten(model: nn.Module, ranks: int) -> Tensor:
    """Move the parameters that are trained into one buffer [P], and make each of them a view of
    its piece.

    P is the smallest multiple of `ranks` that holds them all; the padding at the end is zero.
    The order is that of model.parameters(), which names a tied parameter once. Frozen
    parameters stay where they are. Values and shapes stay the same. A parameter need not be
    contiguous. All trained parameters have one dtype, and the buffer has it too.
    """
    raise NotImplementedError("flatten")


def pieces_of(sizes: Sequence[int], ranks: int, rank: int) -> list[tuple[int, int, int]]:
    """What of which parameter lies in the shard of `rank`: (number, start, stop), in elements
    of that parameter.

    `sizes`: elements of each parameter, in the order of the buffer. A parameter may lie across
    several shards, and a shard may hold several parameters, or padding only; padding is
    nobody's piece. A parameter may have billions of elements.
    Example: sizes [3, 4], 2 ranks, shards of 4 -> rank 0: [(0, 0, 3), (1, 0, 1)]; rank 1:
    [(1, 1, 4)].
    """
    raise NotImplementedError("pieces_of")


class ShardedOptimizer:
    """Data parallel training in which each rank owns the optimizer's state of its shard only.

        sharded = ShardedOptimizer(model, group, lambda params: optim.AdamW(params, lr=1e-3))
        loss.backward()
        sharded.step()               # all ranks have the same new weights, and no gradients

    A step: one reduce-scatter of all gradients, in their dtype, the update of this rank's
    shard, one all-gather of all weights. Between steps nothing is kept but the weights and the
    shard's state: no gradient, no second buffer. The padding stays zero.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        make_optimizer: Callable[[list[nn.Parameter]], optim.Optimizer],
    ) -> None:
        """Flatten the model, give all ranks rank 0's parameters, frozen ones too, and make
        self.optimizer.

        self.optimizer = make_optimizer([shard]), where the shard is one nn.Parameter [S] in the
        memory of the buffer.
        """
        raise NotImplementedError("ShardedOptimizer.__init__")

    @torch.no_grad()
    def step(self) -> None:
        """Mean gradient of my shard, update, everyone's new shards.

        A gradient that is None counts as zero.
        """
        raise NotImplementedError("ShardedOptimizer.step")


def step_traffic(
    strategy: str, buckets: Sequence[int], ranks: int, itemsize: int
) -> dict[str, tuple[int, int]]:
    """What a rank sends in a step, {collective: (calls, bytes)}: each bucket travels by itself.

    strategy: "ddp" all-reduces each bucket of gradients, "zero1" reduce-scatters it, and
    all-gathers the new weights.
    buckets: elements of each. A bucket is padded to a multiple of `ranks` before it travels,
    and padding costs bytes.
    Example: "zero1", buckets [5, 4], 2 ranks, 4 bytes -> {"reduce_scatter": (2, 20),
    "all_gather": (2, 20)}.
    """
    raise NotImplementedError("step_traffic")
