"""`OnDevice`: what a model's constructor allocates, on a device and in a dtype of your choice, "meta" for none at all.

DeepSpeed: deepspeed/utils/init_on_device.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full)  # parameters begin as one of these


class OnDevice(TorchFunctionMode):
    """Context manager: `torch.empty`, `zeros`, `ones` and `full` make tensors on `device`, floating ones in `dtype`.

    A `device` that the call names wins.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "meta", enabled: bool = True) -> None:
        super().__init__()
        self.dtype, self.device, self.enabled = dtype, device, enabled

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not self.enabled or func not in FACTORIES:
            return func(*args, **kwargs)
        if kwargs.get("device") is None:
            kwargs["device"] = self.device
        made: Tensor = func(*args, **kwargs)
        return made.to(self.dtype) if made.is_floating_point() else made
