"""What the language leaves open is made to be seen: an answer must not live on what one CPU happens to do."""

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
