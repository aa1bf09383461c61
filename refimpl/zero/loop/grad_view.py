"""What `p.grad` shows and takes under a stage: the mean over ranks, where it is whole or as the 1/N that is here.

Under DDP it is a view of the bucket, so every loop over `p.grad` works as in plain torch. From ZeRO-1 on a rank has
1/N of the mean: `p.grad` is then a `GradientShard`, of p's shape, that answers what torch's clipping and the usual
logging ask: its norm is the whole gradient's (one all-reduce for all parameters, kept until a gradient changes, so
every rank must ask), and factors and bounds are applied to the part that is here. Anything else is an error that names
the remedy. FSDP2 does the same with DTensor: torch/distributed/tensor/_ops/_math_ops.py.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from refimpl.zero.backward import in_backward
from refimpl.zero.flat import Bucket
from refimpl.zero.gradients import Gradients
from refimpl.zero.parameter import GRAD, raw_grad

aten = torch.ops.aten
ELEMENTWISE = {
    aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar, aten.clamp_.default, aten.clamp_.Tensor,
    aten.clamp_min_.default, aten.clamp_max_.default, aten.zero_.default, aten.nan_to_num_.default,
}  # fmt: skip


PARTED = (
    "the norm of this gradient would be of this rank's part of the model: set gradient_clipping in the configuration, "
    "or ZeroConfig.gradient_clipping; engine.get_global_grad_norm() is of all parts"
)
NO_GRAD_SCALER = (
    "torch.amp.GradScaler looks for overflow on this rank alone, so ranks would skip different steps. Leave it out "
    "(GradScaler(enabled=False)) and give the stage a scaler: Zero2(model, optimizer, scaler=DynamicLossScaler()), "
    "with stage.backward(loss) or stage.scale(loss).backward()"
)
NORMS = (torch.linalg.vector_norm, torch.norm, torch._foreach_norm, Tensor.norm)


class GradientView:
    """Reads and writes single gradients in `gradients`."""

    def __init__(self, gradients: Gradients, settle: Callable[[], object], parted: bool = False) -> None:
        """`settle` closes a backward pass that is over: see `BackwardPass`."""
        self.gradients, self.settle = gradients, settle
        self.parted = parted  # whether other ranks have other parts of the model: see `Stage.spans`, or other experts
        self._norms: dict[float, dict[nn.Parameter, Tensor]] = {}
        self._of: list[int] = []  # what the norms are of: generation and version of each total
        self._shown: dict[Bucket, WeakValueDictionary[int, Tensor]] = {}  # views by id, as long as somebody keeps them
        gradients.held = self.held

    @torch.no_grad()
    def read(self, p: nn.Parameter) -> Tensor | None:
        """The gradient of p since the last step: the mean over ranks, or this rank's own if it is not reduced yet.

        A view in p's shape, or a `GradientShard`; None when there is none. Inside backward, and of a parameter that
        is not trained here, it is autograd's own.
        """
        grads = self.gradients
        if p not in grads.bucket_of or in_backward():
            return raw_grad(p)
        self.settle()
        bucket, name = grads.bucket_of[p], grads.names[p]
        total, local = grads.total.get(bucket), grads.waiting(p)
        if local is not None and total is not None:
            raise RuntimeError(
                f"the gradient of {name} is in two parts, one reduced and one of this rank's own: read it when the "
                "backward of the last micro-batch has reduced it"
            )
        if total is None:
            return local
        whole = total.numel() == bucket.padded
        # Every rank must give the same answer: where p is cut, none knows alone whether another one has used it.
        if p in grads.dropped or (whole and p not in grads.used and not bucket.piece(total, p).any()):
            return None
        shown = (
            bucket.piece(total, p)
            if whole
            else GradientShard(p, self.mine(p), partial(self.change, p), lambda order: self.norm(p, order), name)
        )
        shown = shown.as_subclass(OfAPart) if self.parted and whole else shown
        self._shown.setdefault(bucket, WeakValueDictionary())[id(shown)] = shown
        return shown

    def held(self, bucket: Bucket) -> bool:
        """Whether a view of this step's gradients is still somebody's: then its memory is not for the next step."""
        return bool(self._shown.pop(bucket, None))

    def refuse_waiting(self, p: nn.Parameter) -> None:
        """This rank's own gradient of p has still to be reduced: what is reduced already is not all of it."""
        if self.gradients.waiting(p) is not None:
            raise RuntimeError(
                f"the gradient of {self.gradients.names[p]} waits on each rank for the last micro-batch's backward, "
                "which reduces it: there is no shard of it yet; full_gradient (safe_get_full_grad) is the mean so far"
            )

    def mine(self, p: nn.Parameter) -> Tensor:
        """The part of p's reduced gradient that this rank has, flat, see `away`; RuntimeError if there is none."""
        self.refuse_waiting(p)
        bucket = self.gradients.bucket_of[p]
        total = self.gradients.total.get(bucket)
        if total is None:
            raise RuntimeError(f"{self.gradients.names[p]} has no reduced gradient: read it between backward and step")
        return bucket.part(total, p)

    def change(self, p: nn.Parameter, write: Callable[[Tensor], object]) -> None:
        """Let `write` change what `mine` gives. RuntimeError if there is none."""
        self.mine(p)
        bucket = self.gradients.bucket_of[p]
        self.gradients.change(bucket, *bucket.within(self.gradients.total[bucket].numel(), p), write)

    @torch.no_grad()
    def write(self, p: nn.Parameter, value: Tensor | None) -> None:
        """Replace the gradient of p: the mean over ranks, or this rank's own if none is reduced. None drops it.

        ValueError for another shape than p's.
        """
        grads = self.gradients
        if p not in grads.bucket_of or in_backward():
            GRAD.__set__(p, value)
            return
        self.settle()
        if value is not None and value.shape != p.shape:
            raise ValueError(
                f"{grads.names[p]}.grad: a gradient of shape {tuple(value.shape)} for a parameter of shape "
                f"{tuple(p.shape)}"
            )
        if value is None:
            grads.discard(p)
        elif grads.bucket_of[p] not in grads.total:
            grads.discard(p)
            grads.add(p, value)
            grads.waiting(p)  # copied at once: the tensor stays the caller's
        elif not isinstance(value, GradientShard):
            grads.used.add(p)
            if grads.bucket_of[p] in grads.filling:
                grads.filling[grads.bucket_of[p]].discard(p)
            mine = grads.bucket_of[p].cut(value, p, self.mine(p).numel())
            self.change(p, lambda part: part.copy_(mine))

    def norm(self, p: nn.Parameter, order: float) -> Tensor:
        """The norm of p's whole gradient, fp32. A collective: all parameters' norms are found at once."""
        if self.parted:
            raise RuntimeError(PARTED)
        state = [self.gradients.generation, *(total._version for total in self.gradients.total.values())]
        if state != self._of:
            self._of, self._norms = state, {}
        if order not in self._norms:
            self._norms[order] = self._all_norms(order)
        return self._norms[order][p].clone()

    def of_slice(self, like: nn.Parameter, bucket: Bucket, start: int, end: int) -> Tensor | None:
        """The gradient of a slice that the optimizer knows, start to end of what this rank owns of the bucket.

        Its norm is that of all ranks' parts of the bucket, and 0 for all but the first slice of one.
        """
        total = self.gradients.total.get(bucket)
        if total is None:
            return None
        part = total[start:end].view(like.shape)
        if total.numel() == bucket.padded:
            return part

        def norm(order: float) -> Tensor:
            parts = torch.stack([self.norm(p, order) for p in bucket.params])
            whole: Tensor = torch.linalg.vector_norm(parts, order)
            return whole if start == 0 else torch.zeros_like(whole)

        change = partial(self.gradients.change, bucket, start, end)
        return GradientShard(like, part, change, norm, f"a slice of {bucket.name}")

    def _parts(self, params: list[nn.Parameter]) -> Iterator[Tensor]:
        """What `mine` gives, brought from where it rests, each bucket once: its parameters come together."""
        for bucket, those in groupby(params, self.gradients.bucket_of.__getitem__):
            total = self.gradients.reduced(bucket)
            assert total is not None
            yield from (bucket.part(total, p) for p in those)

    def _all_norms(self, order: float) -> dict[nn.Parameter, Tensor]:
        params = [p for p, bucket in self.gradients.bucket_of.items() if bucket in self.gradients.total]
        most = order == float("inf")
        powers = torch.zeros(len(params), dtype=torch.float64, device=self.gradients.group.device)
        for i, part in enumerate(self._parts(params)):
            if part.numel():
                powers[i] = part.double().abs().max() if most else part.double().abs().pow(order).sum()
        self.gradients.group.all_reduce(powers, "max" if most else "sum", tag="norm")
        norms = (powers if most else powers.pow(1 / order)).float()
        return dict(zip(params, norms.unbind(), strict=True))


class OfAPart(Tensor):
    """A gradient of a model of which other ranks have other parts: an ordinary tensor but for its norm."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in NORMS:
            raise RuntimeError(PARTED)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class GradientShard(Tensor):
    """A gradient of the parameter's shape of which this rank has `part`, flat [0..numel], which `change` writes to."""

    part: Tensor
    label: str
    change: Callable[[Callable[[Tensor], object]], None]
    of: Callable[[float], Tensor]  # its norm

    @staticmethod
    def __new__(
        cls,
        p: nn.Parameter,
        part: Tensor,
        change: Callable[[Callable[[Tensor], object]], None],
        of: Callable[[float], Tensor],
        name: str,
    ) -> "GradientShard":
        self: GradientShard = Tensor._make_wrapper_subclass(cls, p.shape, dtype=part.dtype, device=part.device)
        self.part, self.change, self.label, self.of = part, change, name, of
        return self

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GradientShard({self.label}, {self.part.numel()} of {self.numel()} elements here)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        grad, *rest = args
        if isinstance(grad, GradientShard) and not any(isinstance(a, GradientShard) for a in rest):
            if func is aten.linalg_vector_norm.default and not rest[1:] and (not rest or rest[0] > 0):
                return grad.of(float(rest[0]) if rest else 2.0)
            if func in ELEMENTWISE and not any(isinstance(a, Tensor) and a.numel() > 1 for a in rest):
                there = [a.to(grad.device) if isinstance(a, Tensor) else a for a in rest]
                grad.change(lambda part: func(part, *there, **(kwargs or {})))
                return grad
            if func in (aten.detach.default, aten.alias.default):
                return grad
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            raise RuntimeError(NO_GRAD_SCALER)
        shard = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, GradientShard))
        raise NotImplementedError(
            f"{func} on the gradient of {shard.label}: this rank has 1/N of it. stage.clip_grad_norm_(limit) clips, "
            f"stage.full_gradient({shard.label!r}) brings it all, stage.local_gradient({shard.label!r}) this part"
        )
