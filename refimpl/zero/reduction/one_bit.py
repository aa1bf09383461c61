"""DDP in which something else than the gradients travels: the momentum, one bit an element, by the optimizer's wish.

    optimizer wants the mean gradient    `DDP.reduce`, as ever (the warm-up)
    else                                 each rank keeps its own; the optimizer calls `exchange.mean`

A momentum's way: `OneBitAdam.update` -> `Means.mean` -> the buckets' `Served` -> the same momentum on every rank.
Bytes of a mean, n elements of a bucket on N ranks: 2 (N-1) ceil(n / 8N), and twice a scale of 2 bytes for each `BLOCK`
of elements: 1/16 of fp16's all-reduce and the scales, 1/14.2 with them. Memory: 4 bytes an element as it travels, and
the errors', see compress/feedback.py: they count only once the step has used what was sent, and a step that is skipped
for an overflow sends nothing. The gradient's norm is known of each rank alone then: `grad_norm`, by which all clip
alike, is the root of the mean of the ranks' squared norms, never less than the norm of the mean gradient.
Tang et al. 2021, arXiv:2102.02888, figure 3. DeepSpeed until 0.19.6: deepspeed/runtime/fp16/onebit/adam.py with
runtime/comm/compressed.py, for ZeRO stage 0 only, as here; there each rank clips by its own norm.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from refimpl.comm.group import Group
from refimpl.comm.work import Work
from refimpl.compress.exchange import Served
from refimpl.compress.sign_blocks import SignBlocks
from refimpl.optim.travelling import Travelling
from refimpl.zero.flat import Bucket
from refimpl.zero.optimizer.slices import Slices
from refimpl.zero.reduction.flights import Reduction
from refimpl.zero.reduction.owing import place, warn_of_loss
from refimpl.zero.update import Update

if TYPE_CHECKING:
    from refimpl.zero.stage import Stage

BLOCK = 128  # elements that share a scale: on the demo's text 1024 end with losses some percent higher
Reduce = Callable[[Bucket, Tensor], Reduction]


def unless_local(stage: "Stage", optimizer: Travelling) -> Reduce:
    """The stage's `reduce` where the optimizer wants the mean gradient, else each rank's own.

    ValueError where the stage has a compression of its own.
    """
    if stage.config.compression is not None:
        raise ValueError(f"compression: {type(optimizer).__name__} compresses by itself; keep one of the two")

    def either(bucket: Bucket, local: Tensor) -> Reduction:
        if optimizer.takes_mean_gradient:
            return stage.reduce(bucket, local)
        if stage.gradients.op == "sum":  # and what follows divides by the ranks, or the sum is asked for
            local.mul_(bucket.group.size)
        return Reduction(Work(), local, memory=local)

    return either


class Means:
    """The exchange of an optimizer whose slices are whole parameters: one `Served` a bucket."""

    slices: Slices

    def __init__(self, group: Group, name: str) -> None:
        """`name`: the optimizer's."""
        self.group, self.rank, self.name = group, group.rank, name
        self.served: dict[Bucket, Served] = {}

    def add(self, slices: Slices, buckets: Iterable[Bucket]) -> None:
        """Exchange what is of these buckets too, of which these are the slices."""
        self.slices = slices
        for bucket in buckets:
            if bucket.group.size > 1:
                n = sum(p.numel() for p in bucket.params)
                self.served[bucket] = Served(bucket.group, SignBlocks(BLOCK), n, tag="momentum")

    def mean(self, params: list[Tensor], values: list[Tensor], dead: list[Tensor]) -> None:
        """See `refimpl.optim.travelling.Exchange`. Slices that are not among `params` keep their errors."""
        row_of = {id(p): row for row, p in enumerate(params)}
        under_way: list[tuple[Bucket, Work, Tensor, Tensor]] = []
        for bucket, served in self.served.items():
            here = [row_of.get(id(s.param)) for s in self.slices.of[bucket]]
            if all(row is None for row in here):
                continue  # on every rank alike
            flat = self.laid_out(bucket, here, values, torch.float32)
            out = self.laid_out(bucket, here, dead, torch.bool)
            under_way.append((bucket, served.mean(flat, flat), flat, out))
            if len(under_way) > 1:  # one travels while the next is compressed
                self.receive(*under_way.pop(0), row_of, values)
        for one in under_way:
            self.receive(*one, row_of, values)

    def laid_out(self, bucket: Bucket, rows: list[int | None], tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
        """The bucket's parameters' tensors end to end, without padding; 0 for those that are not there. -> [n]"""
        pieces = zip(rows, bucket.params, strict=True)
        return torch.cat(
            [
                torch.zeros(p.numel(), dtype=dtype, device=bucket.device)
                if row is None else tensors[row].reshape(-1).to(dtype)
                for row, p in pieces
            ]
        )  # fmt: skip

    def receive(
        self, bucket: Bucket, work: Work, flat: Tensor, dead: Tensor, row_of: dict[int, int], values: list[Tensor]
    ) -> None:
        """The mean of a bucket into the values; errors only of what took part."""
        served = self.served[bucket]
        work.wait()
        flat.masked_fill_(dead, 0)
        for at, feedback in served.placed():
            feedback.error.masked_fill_(dead[at : at + feedback.n], 0)
        start = 0
        for s in self.slices.of[bucket]:
            end, row = start + s.param.numel(), row_of.get(id(s.param))
            if row is None:
                served.revert(start, end)
            else:
                values[row].copy_(flat[start:end].view(values[row].shape))
            start = end
        served.accept()

    def forget(self) -> None:
        """Errors of zero."""
        for served in self.served.values():
            for _, feedback in served.placed():
                feedback.error.zero_()

    def tensors(self) -> list[Tensor]:
        """The errors."""
        return [tensor for served in self.served.values() for tensor in served.tensors()]

    def errors(self) -> dict[str, Tensor]:
        """Every error of this rank, by bucket and place."""
        return {
            f"{i}.{j}": feedback.error
            for i, served in enumerate(self.served.values())
            for j, (_, feedback) in enumerate(served.placed())
        }

    def state_dict(self) -> dict[str, Any]:
        return {**place(self.group), "errors": self.errors()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Errors of the same ranks and buckets; else they begin at zero, as they do in DeepSpeed after every load."""
        here, saved = self.errors(), state or {"ranks": 0, "errors": {}}
        same_ranks = all(saved.get(key) == value for key, value in place(self.group).items())
        shapes = ({key: e.shape for key, e in errors.items()} for errors in (here, saved["errors"]))
        fits = same_ranks and next(shapes) == next(shapes)
        for key, error in here.items():
            error.copy_(saved["errors"][key]) if fits else error.zero_()
        if here and not fits:
            others = ", in other buckets" if same_ranks else ""
            warn_of_loss(self.group, self.name, f"{saved['ranks']} ranks{others}", str(self.group.size))


class OneBitUpdate(Update):
    """As `Update`, of an optimizer that may be handed each rank's own gradient, and averages by itself."""

    def __init__(self, optimizer: Travelling, owned: dict[Bucket, Tensor], group: Group, *args: Any) -> None:
        self.averaging, self.means = optimizer, Means(group, type(optimizer).__name__)
        self.owing = self.means
        super().__init__(optimizer, owned, group, *args)
        optimizer.exchange = self.means

    def add(self, owned: dict[Bucket, Tensor]) -> None:
        super().add(owned)
        self.means.add(self.slices, owned)

    @property
    def averaged(self) -> bool:
        return self.averaging.takes_mean_gradient

    def catch_up(self) -> bool:
        """Weights that differ between ranks meet; whether they did."""
        if not self.averaging.meet():
            return False
        for bucket in self.masters:
            self.publish(bucket)
        return True

    def replicated(self) -> bool:
        """No: a rank's momentum and errors may be its own, and between two meetings its weights."""
        return False

    def state(self) -> list[Tensor]:
        return [*super().state(), *self.means.tensors()]
