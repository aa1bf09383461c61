"""`p.ds_tensor`: this rank's part of a sharded parameter, which takes what is written to it.

    p.ds_tensor.copy_(t), p.ds_tensor[0] = 1     in place
    p.ds_tensor.data = t, p.ds_tensor = t        t is copied; another dtype, shape or device is refused

It is what the next gather brings and what the next step starts from (DeepSpeed's goes on from its fp32 masters). A part
that rests on a disk is read, and written back. Of a parameter that stays whole on every rank a part alone cannot be
written: RuntimeError. DeepSpeed: deepspeed/runtime/zero/partition_parameters.py, `_partition_param`.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.zero.parameter import DATA, stage_of
from refimpl.zero.unit import Unit, unit_of


class Fragment(Tensor):
    """One-dimensional: a view of the shard, or of a copy of it. Whatever is computed from it is a plain tensor."""

    param: nn.Parameter
    unit: Unit | None

    @staticmethod
    def of(p: nn.Parameter) -> "Fragment":
        """What this rank has of p, in the training dtype."""
        unit, stage = unit_of(p), stage_of(p)
        bucket = unit if unit is not None or stage is None else stage.home(p)
        part = DATA.__get__(p).view(-1) if bucket is None else bucket.part(bucket.now(), p)
        self = part.as_subclass(Fragment)
        self.param, self.unit = p, unit
        return self

    @property
    def data(self) -> Tensor:
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is self:
            return
        if (value.dtype, value.device, value.shape) != (self.dtype, self.device, self.shape):
            raise RuntimeError(
                f"{self._label()}: it is {self.dtype} on {self.device}, shape {tuple(self.shape)}, and cannot become "
                f"{value.dtype} on {value.device}, shape {tuple(value.shape)}"
            )
        with torch.no_grad():
            self.copy_(value)

    def _label(self) -> str:
        stage = stage_of(self.param)
        return f"ds_tensor of parameter {stage.name_of(self.param) if stage else tuple(self.param.shape)}"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        written = args[0] if args and isinstance(args[0], Fragment) and writes(func) else None
        with torch._C.DisableTorchFunctionSubclass():
            if written is None:
                return func(*args, **(kwargs or {}))
            unit = written.unit
            if unit is None:
                raise RuntimeError(
                    f"{written._label()}: this parameter stays whole on every rank, and a part of it cannot be written "
                    "alone. Write the same to all of it on every rank: safe_set_full_fp32_param(p, t), p.data.copy_(t)"
                )
            result = func(*args, **(kwargs or {}))
            if unit.shelf is not None:
                flat = unit.now()
                unit.part(flat, written.param).copy_(written)
                unit.shelf.write(0, flat)
                unit.shelf.was_written = True
            unit.changed()
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def writes(func: Any) -> bool:
    """Whether it changes its first argument: `copy_`, `__setitem__`, `__iadd__`."""
    return IN_PLACE.fullmatch(getattr(func, "__name__", "")) is not None


IN_PLACE = re.compile(r".*[^_]_|__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__")
