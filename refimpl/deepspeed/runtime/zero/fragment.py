"""`p.ds_tensor`: this rank's part of a sharded parameter, which takes what is written to it.

    p.ds_tensor.copy_(t), p.ds_tensor[:4].zero_()     in place, also through a view, or as `out=`
    p.ds_tensor.data = t, p.ds_tensor = t             t is copied; another dtype, shape or device is refused

It is what the next gather brings and what the next step starts from (DeepSpeed's goes on from its fp32 masters). A part
that rests on a disk is read, and written back whole: take it anew after a step. Of a parameter that stays whole on
every rank a part alone cannot be written: RuntimeError. DeepSpeed: deepspeed/runtime/zero/partition_parameters.py,
`_partition_param`.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from refimpl.zero.gather.unit import Unit, unit_of
from refimpl.zero.parameter import DATA, stage_of


class Fragment(Tensor):
    """The part or a view of it, in the shard or a copy of that. Whatever else is computed from it is a plain tensor."""

    param: nn.Parameter
    unit: Unit | None
    part: Tensor  # all of it, one-dimensional

    @staticmethod
    def of(p: nn.Parameter) -> "Fragment":
        """What this rank has of p, in the training dtype."""
        unit, stage = unit_of(p), stage_of(p)
        bucket = unit if unit is not None or stage is None else stage.home(p)
        part = DATA.__get__(p).view(-1) if bucket is None else bucket.part(bucket.now(), p)
        self = part.as_subclass(Fragment)
        self.param, self.unit, self.part = p, unit, part
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
        changed = (kwargs or {}).get("out", args[0] if args and writes(func) else None)
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(changed, Fragment) and changed.unit is None:
                raise RuntimeError(
                    f"{changed._label()}: this parameter stays whole on every rank, and a part of it cannot be written "
                    "alone. Write the same to all of it on every rank: safe_set_full_fp32_param(p, t), p.data.copy_(t)"
                )
            result = func(*args, **(kwargs or {}))
            if isinstance(changed, Fragment):
                changed._keep()
                return result
            return tree_map_only(Tensor, args[0]._shown, result) if args and isinstance(args[0], Fragment) else result

    def _keep(self) -> None:
        """It was written: so is the shard."""
        unit = self.unit
        assert unit is not None
        if unit.shelf is not None:
            flat = unit.now()
            unit.part(flat, self.param).copy_(self.part)
            unit.shelf.write(0, flat)
            unit.shelf.was_written = True
        unit.changed()

    def _shown(self, result: Tensor) -> Tensor:
        """`result` of a call with this one: a fragment too where it is a view, as what is written to it must count."""
        if torch._C._is_alias_of(self, result):  # type: ignore[attr-defined]
            result = result.as_subclass(Fragment)
            result.__dict__.update(self.__dict__)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def writes(func: Any) -> bool:
    """Whether it changes its first argument: `copy_`, `__setitem__`, `__iadd__`."""
    return IN_PLACE.fullmatch(getattr(func, "__name__", "")) is not None


IN_PLACE = re.compile(r".*[^_]_|__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__")
