"""Parameters laid end to end in padded flat buffers: the buckets that every stage communicates and shards.

    N   ranks
    P   padded number of elements in a bucket, a multiple of N * ALIGN
    S   P / N, the elements of it that one rank owns

Shapes in comments are [P] for a full buffer and [S] for a shard. Each bucket is cut into N shards, so every reduction
and every gather keeps all ranks equally busy (as in Megatron-LM's distributed optimizer). DeepSpeed cuts the whole flat
group instead (deepspeed/runtime/zero/stage_1_and_2.py), so that a bucket may belong to one rank alone.
The padding is zero, gets zero gradients and is never saved.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from refimpl.comm.group import Group, Work

ALIGN = 64  # elements: torch's fused AdamW gives the same bits on any cut that falls on a multiple of 64


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class Bucket:
    """Parameters of one optimizer group and dtype; their data become views of one buffer [P]."""

    def __init__(self, params: list[nn.Parameter], group: Group, group_index: int = 0, name: str = "") -> None:
        """`params` allocated, of one dtype. `group_index`: their group in the optimizer. `name`: for messages."""
        self.params, self.group, self.group_index, self.name = params, group, group_index, name
        self.offset: dict[nn.Parameter, int] = {}
        self.numel = 0
        for p in params:
            self.offset[p] = self.numel
            self.numel += p.numel()
        self.padded = round_up(self.numel, group.size * ALIGN)
        self.dtype, self.device = params[0].dtype, params[0].device
        self.full = torch.zeros(self.padded, dtype=self.dtype, device=self.device)  # [P]
        with torch.no_grad():
            for p in params:
                self.piece(self.full, p).copy_(p)
        self.attach()

    def attach(self) -> None:
        """Make every parameter a view of `full`."""
        for p in self.params:
            p.data = self.piece(self.full, p)

    def piece(self, flat: Tensor, p: nn.Parameter) -> Tensor:
        """The part of flat [P] that belongs to p, in p's shape."""
        return flat[self.offset[p] : self.offset[p] + p.numel()].view(p.shape)

    def shard(self, flat: Tensor) -> Tensor:
        """flat [P] -> the view [S] that this rank owns."""
        return flat.view(self.group.size, -1)[self.group.rank]

    def gather(self, most: int) -> list[Work]:
        """Start to fill `full` [P] with every rank's shard of it, at most about `most` elements a call."""
        rows = self.full.view(self.group.size, -1)  # [N, S]
        width = max(1, most // self.group.size)
        if rows.shape[1] <= width:
            return [self.group.all_gather(self.full, self.shard(self.full), async_op=True, tag="parameters")]
        return [
            self.group.all_gather(list(cut.unbind()), cut[self.group.rank], async_op=True, tag="parameters")
            for cut in torch.split(rows, width, dim=1)
        ]


def gather_all(buckets: list[Bucket], most: int) -> None:
    """Every rank's updated shards to every rank: all buckets on their way before the first is waited for."""
    for work in [work for bucket in buckets for work in bucket.gather(most)]:
        work.wait()


def trained(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[nn.Parameter, int]:
    """The parameters to update, each with its optimizer group; frozen ones are left out.

    ValueError names a parameter that wants a gradient but that no group holds: it would silently stay as it is.
    """
    group_of = {p: i for i, g in enumerate(optimizer.param_groups) for p in g["params"] if p.requires_grad}
    for name, p in model.named_parameters():
        if p.requires_grad and p not in group_of:
            raise ValueError(
                f"parameter {name} requires a gradient but is in no group of the optimizer: "
                "add it to one, or freeze it with requires_grad_(False)"
            )
    return group_of


def lay_out(
    model: nn.Module,
    group_of: dict[nn.Parameter, int],
    group: Group,
    size: int,
    wanted: Callable[[nn.Parameter], bool] = lambda _: True,
) -> list[Bucket]:
    """Buckets of at most `size` elements (or one larger parameter), in the order in which backward will fill them.

    Backward reaches parameters roughly in reverse order of registration, so that is the order inside a bucket, and
    buckets are ordered by their last parameter: the one that completes them.
    """
    place = {p: i for i, p in enumerate(reversed([p for p in model.parameters() if p in group_of and wanted(p)]))}
    open_: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
    full: list[list[nn.Parameter]] = []
    for p in place:
        key = (group_of[p], p.dtype)
        if key in open_ and sum(q.numel() for q in open_[key]) + p.numel() > size:
            full.append(open_.pop(key))
        open_.setdefault(key, []).append(p)
    full += open_.values()
    full.sort(key=lambda params: place[params[-1]])
    return [Bucket(params, group, group_of[params[0]], f"bucket {i}") for i, params in enumerate(full)]
