"""What the language leaves open is made to be seen: an answer must not live on what one CPU happens to do."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
ODD = 99  # what NaN becomes, in any integer type; C allows every number, and x86 has 0 or the least


class NoInteger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, a NaN that is cast to an integer becomes `ODD`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in CASTS and not (result.is_floating_point() or result.dtype == torch.bool):
            given: Tensor = args[1] if len(args) > 1 else args[0]
            if given.is_floating_point():
                result.masked_fill_(given.isnan().expand_as(result), ODD)
        return result


@contextmanager
def masked_off(fill: float = 0.0) -> Iterator[list[Any]]:
    """Inside, a float that no lane has loaded in Triton's interpreter, as a mask switches it off, is `fill`.

    Where `other` gives a value it is that. Yielded is a list, empty as long as there is no such lane. A single lane is
    left alone: to the interpreter an `other` of 0 is none there.
    """
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    original, masks = builder.create_masked_load, list[Any]()

    def load(pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        result = original(pointers, mask, other, *rest)
        if other is None and mask.data.size > 1 and result.data.dtype.kind == "f" and not mask.data.all():
            masks.append(mask)
            result.data[~mask.data.astype(bool)] = fill
        return result

    builder.create_masked_load = load
    try:
        yield masks
    finally:
        builder.create_masked_load = original
