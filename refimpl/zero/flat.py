"""Parameters laid end to end in padded flat buffers: the buckets that every stage communicates and shards.

    N   ranks
    P   padded number of elements in a bucket, a multiple of N * ALIGN
    S   P / N, the elements of it that one rank owns

Shapes in comments are [P] for a full buffer and [S] for a shard. Each bucket is cut into N shards, so every reduction
and every gather keeps all ranks equally busy (as in Megatron-LM's distributed optimizer). DeepSpeed cuts the whole flat
group instead (deepspeed/runtime/zero/stage_1_and_2.py), so that a bucket may belong to one rank alone.
Each parameter begins on a multiple of 16 elements (DeepSpeed: 8) and lies row by row, whatever its strides were: with a
transposed or a channels_last one products may round otherwise than before. The padding is zero, gets zero gradients
and is never saved.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from refimpl.comm.collectives import Op
from refimpl.comm.group import Group
from refimpl.comm.work import Work
from refimpl.offload.shelf import Shelf
from refimpl.zero.parameter import Managed, place

if TYPE_CHECKING:
    from refimpl.zero.reduction.quantised_sum import QuantisedSum

ALIGN = 64  # elements: torch's fused AdamW gives the same bits on any cut that falls on a multiple of 64
ALIGN_PARAMETER = 16  # elements: a vector of AVX-512, see `Slices.set_apart`; cuBLAS likes a matrix to begin on 8


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class Bucket:
    """Parameters of one optimizer group and dtype; their data become views of one buffer [P], with rank 0's values."""

    awaited = 0  # uses by modules that are gathered whole, of which backward is not through yet: see `Fetch.hold`
    sum: "QuantisedSum | None" = None  # what reduces its gradients where they travel rounded: see `Plus`
    shelf: Shelf | None = None  # where this rank's shard rests, if not in memory: see `Unit`

    def __init__(
        self,
        params: list[nn.Parameter],
        group: Group,
        group_index: int = 0,
        name: str = "",
        dtype: torch.dtype | None = None,
    ) -> None:
        """`params` allocated, of one dtype, which becomes `dtype`. `group_index`: their group in the optimizer.

        A collective: every rank gets rank 0's values. `name`: for messages.
        """
        self.params, self.group, self.group_index, self.name = params, group, group_index, name
        self.offset: dict[nn.Parameter, int] = {}
        self._strided: dict[nn.Parameter, tuple[torch.Size, tuple[int, ...], int]] = {}  # shape, stride, offset
        self.numel = 0
        for p in params:
            self.offset[p] = round_up(self.numel, ALIGN_PARAMETER)
            self.numel = self.offset[p] + p.numel()
            self._strided[p] = (p.shape, torch.empty(p.shape, device="meta").stride(), self.offset[p])
        self.padded = round_up(self.numel, group.size * ALIGN)
        self.shard_numel = self.padded // group.size  # S
        self.device = params[0].device
        is_padding = torch.ones(self.padded, dtype=torch.bool)
        for piece in self.pieces(is_padding):
            piece.fill_(False)
        self.padding = is_padding.nonzero().view(-1).to(self.device)  # indices that are no parameter's
        whole = self.room(params[0].dtype).zero_()  # [P]
        with torch.no_grad():
            for p, piece in zip(params, self.pieces(whole), strict=True):
                piece.copy_(p)
        group.broadcast(whole, tag="start")
        self.dtype = dtype if dtype is not None and whole.is_floating_point() else whole.dtype
        self.full = whole if whole.dtype == self.dtype else self.room(self.dtype).copy_(whole)  # [P]
        self.mine = self.shard(self.full)  # [S]
        self.unrounded = None if self.full is whole else whole  # what fp32 master weights begin with
        self.views = dict(zip(params, self.pieces(self.full), strict=True))
        self.attach()

    def room(self, dtype: torch.dtype) -> Tensor:
        """Memory for `full` [P], which peers may read in place."""
        return self.group.empty(self.padded, dtype, self.device)

    def attach(self) -> None:
        """Make every parameter a view of `full`."""
        place(self.views, Managed)

    def free(self) -> None:
        """Nothing: `full` stays, here. See `Unit`."""

    def keep(self) -> None:
        """`full` was written on every rank alike: nothing to do, here. See `Unit`."""

    def changed(self) -> None:
        """What the ranks own was written from outside: nothing to do, here. See `Unit`."""

    def now(self) -> Tensor:
        """This rank's shard, in memory. -> [S]"""
        return self.mine

    def piece(self, flat: Tensor, p: nn.Parameter) -> Tensor:
        """The part of flat [P] that belongs to p, in p's shape."""
        shape, stride, offset = self._strided[p]
        return flat.as_strided(shape, stride, flat.storage_offset() + offset)

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """The parts of flat [P] that belong to the parameters, in their shapes: a third of the time, where many are."""
        begin = flat.storage_offset()
        return [flat.as_strided(shape, stride, begin + offset) for shape, stride, offset in self._strided.values()]

    def span(self, p: nn.Parameter, rank: int | None = None) -> tuple[int, int]:
        """Start and end of what a rank's shard [S] holds of p; start = end when that is nothing."""
        size = self.shard_numel
        start = (self.group.rank if rank is None else rank) * size
        first, last = self.offset[p] - start, self.offset[p] + p.numel() - start
        return min(max(first, 0), size), min(max(last, 0), size)

    def within(self, numel: int, p: nn.Parameter) -> tuple[int, int]:
        """Start and end of what a buffer of `numel` elements, P or this rank's S, holds of p."""
        return (self.offset[p], self.offset[p] + p.numel()) if numel == self.padded else self.span(p)

    def first_of(self, numel: int) -> int:
        """Which element of the whole buffer one of `numel` elements, P or this rank's S, begins with."""
        return 0 if numel == self.padded else self.group.rank * self.shard_numel

    def part(self, flat: Tensor, p: nn.Parameter, begin: int = 0, end: int | None = None) -> Tensor:
        """What flat, [P] or this rank's [S], holds of p, or of p's elements from begin to end: a flat view."""
        start, stop = self.within(flat.numel(), p)
        at = self.offset[p] - self.first_of(flat.numel())  # where p begins, before flat or in it
        return flat[max(start, at + begin) : max(start, stop if end is None else min(stop, at + end))]

    def cut(self, whole: Tensor, p: nn.Parameter, numel: int) -> Tensor:
        """What of `whole` belongs to a part of `numel` elements: all of it, or this rank's span.

        ValueError if `whole` has another shape than p.
        """
        if whole.shape != p.shape:
            raise ValueError(f"a value of shape {tuple(whole.shape)} for a parameter of shape {tuple(p.shape)}")
        begin = 0 if numel == p.numel() else max(0, self.group.rank * self.shard_numel - self.offset[p])
        return whole.reshape(-1)[begin : begin + numel]

    def shard(self, flat: Tensor) -> Tensor:
        """flat [P] -> the view [S] that this rank owns."""
        begin = self.group.rank * self.shard_numel
        return flat[begin : begin + self.shard_numel]  # row r of a view of no elements begins at r

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op) -> Work:
        """Start to reduce x [P] of every rank -> out [S], this rank's chunk."""
        if self.sum is not None:
            return self.sum.reduce_scatter(self, out, x, op)
        return self.group.reduce_scatter(out, x, op, async_op=True, tag="gradients")

    def gather(self, most: int) -> list[Work]:
        """Start to fill `full` [P] with every rank's shard of it, about `most` elements a call (NCCL: all)."""
        rows = self.full.view(self.group.size, -1)  # [N, S]
        width = max(1, most // self.group.size)
        if rows.shape[1] <= width or not self.group.transport.gathers_lists:
            return [self.group.all_gather(self.full, self.mine, async_op=True, tag="parameters")]
        return [
            self.group.all_gather(list(cut.unbind()), cut[self.group.rank], async_op=True, tag="parameters")
            for cut in torch.split(rows, width, dim=1)
        ]


def gather_all(buckets: list[Bucket], most: int) -> None:
    """Every rank's updated shards to every rank: all buckets on their way before the first is waited for."""
    for work in [work for bucket in buckets for work in bucket.gather(most)]:
        work.wait()


def groups_of(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> dict[nn.Parameter, int]:
    """The optimizer group of each parameter, frozen ones too; without an optimizer all are in group 0.

    Parameters in no group are nobody's to train and are left alone. ValueError for a tensor of the optimizer that is
    not one of the model's parameters: its gradient would never be reduced.
    """
    known = set(model.parameters())
    if optimizer is None:
        return dict.fromkeys(model.parameters(), 0)
    for i, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            if tensor not in known:
                raise ValueError(
                    f"{type(optimizer).__name__}, group {i}: a tensor of shape {tuple(tensor.shape)} is not a "
                    "parameter of the stage's model: put both models in one nn.ModuleList, or an optimizer for each"
                )
    return {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}


def lay_out(
    params: list[nn.Parameter],
    group_of: dict[nn.Parameter, int],
    group: Group,
    size: int,
    dtype: torch.dtype | None = None,
    experts: Mapping[nn.Parameter, Group] | None = None,
) -> list[Bucket]:
    """Buckets of at most `size` elements (or one larger parameter), in the order in which backward will fill them.

    `experts`: the parameters that only a part of the ranks have, and which: see experts.py.

    `params` in order of registration. Backward reaches them roughly in reverse, so that is the order inside a bucket,
    and buckets are ordered by their last parameter: the one that completes them.
    """
    over = experts or {}
    chosen = cut_into_buckets(params, group_of, size, over)
    return [
        Bucket(params, over.get(params[0], group), group_of[params[0]], f"bucket {i}", dtype)
        for i, params in enumerate(chosen)
    ]


def cut_into_buckets(
    params: list[nn.Parameter],
    group_of: dict[nn.Parameter, int],
    size: int,
    experts: Mapping[nn.Parameter, Group] | None = None,
) -> list[list[nn.Parameter]]:
    """Which parameters share a bucket: see `lay_out`."""
    turn = {p: i for i, p in enumerate(reversed(params))}
    open_: dict[tuple[int, torch.dtype, Group | None], list[nn.Parameter]] = {}
    full: list[list[nn.Parameter]] = []
    for p in turn:
        key = (group_of[p], p.dtype, (experts or {}).get(p))
        if key in open_ and sum(q.numel() for q in open_[key]) + p.numel() > size:
            full.append(open_.pop(key))
        open_.setdefault(key, []).append(p)
    full += open_.values()
    full.sort(key=lambda params: turn[params[-1]])
    return full
