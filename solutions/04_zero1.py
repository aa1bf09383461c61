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
    params = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in params)
    flat = torch.zeros(-(-numel // ranks) * ranks, dtype=params[0].dtype)
    at = 0
    for p in params:
        piece = flat[at : at + p.numel()].view(p.shape)
        piece.copy_(p.detach())
        p.data = piece
        at += p.numel()
    return flat


def pieces_of(sizes: Sequence[int], ranks: int, rank: int) -> list[tuple[int, int, int]]:
    """What of which parameter lies in the shard of `rank`: (number, start, stop), in elements
    of that parameter.

    `sizes`: elements of each parameter, in the order of the buffer. A parameter may lie across
    several shards, and a shard may hold several parameters, or padding only; padding is
    nobody's piece. A parameter may have billions of elements.
    Example: sizes [3, 4], 2 ranks, shards of 4 -> rank 0: [(0, 0, 3), (1, 0, 1)]; rank 1:
    [(1, 1, 4)].
    """
    shard = -(-sum(sizes) // ranks)
    pieces, at = [], 0
    for number, size in enumerate(sizes):
        start, stop = max(rank * shard, at), min((rank + 1) * shard, at + size)
        if start < stop:
            pieces.append((number, start - at, stop - at))
        at += size
    return pieces


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
        self.group = group
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.flat = flatten(model, group.size)
        for tensor in [self.flat, *(p.data for p in model.parameters() if not p.requires_grad)]:
            group.broadcast(tensor)
        self.mine = nn.Parameter(self.flat.view(group.size, -1)[group.rank])
        self.optimizer = make_optimizer([self.mine])

    @torch.no_grad()
    def step(self) -> None:
        """Mean gradient of my shard, update, everyone's new shards.

        A gradient that is None counts as zero.
        """
        grads, at = torch.zeros_like(self.flat), 0
        for p in self.params:
            if p.grad is not None:
                grads[at : at + p.numel()].view(p.shape).copy_(p.grad)
            p.grad = None
            at += p.numel()
        self.mine.grad = torch.empty_like(self.mine)
        self.group.reduce_scatter(self.mine.grad, grads, "mean")
        self.optimizer.step()
        self.mine.grad = None
        self.group.all_gather(self.flat, self.mine.detach())


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
    padded = sum(-(-n // ranks) * ranks for n in buckets)
    once = padded // ranks * (ranks - 1) * itemsize
    if strategy == "ddp":
        return {"all_reduce": (len(buckets), 2 * once)}
    return {"reduce_scatter": (len(buckets), once), "all_gather": (len(buckets), once)}


HINTS = {
    "flatten": [
        "Count the elements first, and round up: -(-n // ranks) * ranks.",
        "flat[a:b].view(p.shape) is a view of the buffer in p's shape: copy p into it.",
        "p.data = view makes the parameter live in the buffer, so that writing to the buffer changes the model.",
    ],
    "pieces_of": [
        "A shard is the interval [rank * S, (rank + 1) * S) of the buffer, a parameter another one. What is in both?",
        "The intersection of [a, b) and [c, d) is [max(a, c), min(b, d)), if that is not empty.",
        "Subtract where the parameter begins: the answer counts from the parameter's own first element.",
    ],
    "ShardedOptimizer": [
        "__init__: the optimizer must see one parameter of S elements. State comes from what the optimizer is given.",
        "nn.Parameter(flat.view(N, -1)[rank]) shares memory with the buffer: its update is in place already.",
        "step: lay the gradients out as the weights are, zeros for None and for the padding, then reduce_scatter.",
        "After optimizer.step() only your own shard is new: all_gather the buffer from everyone's shard.",
    ],
    "step_traffic": [
        "A reduce-scatter of a buffer of B bytes sends B (N - 1)/N from each rank, and so does an all-gather.",
        "Pad each bucket, not their sum.",
        "An all-reduce is both halves: twice the bytes in one call.",
    ],
}
