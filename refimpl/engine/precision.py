"""In which dtypes a forward runs: its inputs, torch's autocast around it, and what is wrong where they do not fit."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from refimpl.engine.configuration.schema import DeepSpeedConfig


def in_half(config: DeepSpeedConfig, inputs: Any) -> Any:
    """Floating-point tensors among the inputs cast to fp16, with `fp16.auto_cast`; else the inputs as they are."""
    if not (config.fp16.enabled and config.fp16.auto_cast):
        return inputs
    return tree_map_only(Tensor, lambda x: x.half() if x.is_floating_point() else x, inputs)


@contextmanager
def dtypes_told(config: DeepSpeedConfig, model: nn.Module, *inputs: Any) -> Iterator[None]:
    """torch's "must have the same dtype" names neither input nor buffer nor the key that has made the model 16-bit."""
    try:
        yield
    except RuntimeError as error:
        dtype = config.dtype
        key = "fp16" if dtype == torch.float16 else "bf16"
        given = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        if dtype != torch.float32 and "type" in str(error):
            if _others(given, dtype):
                error.add_note(
                    f"{key}.enabled has made the model {dtype}, and an input is not: cast it, or let the engine: "
                    '"fp16": {"auto_cast": true}, or in place of the section "torch_autocast": {"enabled": true}'
                )
            names = {buffer: name for name, buffer in model.named_buffers()}
            if kept := _others(names, dtype):
                error.add_note(
                    f"{key}.enabled has made the model {dtype}, and its buffers are left as they were: "
                    f'{names[kept[0]]} is {kept[0].dtype}; "data_types": {{"buffer_dtype": "{key}"}} casts them too'
                )
        raise


def _others(tensors: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x for x in tensors if x.is_floating_point() and x.dtype != dtype]


def autocast(config: DeepSpeedConfig, device: torch.device) -> AbstractContextManager[Any]:
    """As the configuration says; where it says nothing, a script's own autocast around the call goes on.

    torch's cache has one rounded copy of a weight serve all products, whose gradients are then added up in 16 bits.
    Without it (ZeRO-3) each product has a copy of its own, and they are added up in fp32: of a weight that several
    products use the bits are those of `torch.autocast(cache_enabled=False)`. A script's own has the cache.
    """
    asked, stage = config.torch_autocast, config.zero_optimization.stage
    if not asked.enabled:
        return nullcontext()
    # The cache would keep every rounded weight until forward is over, which ZeRO-3 has no memory for.
    return torch.autocast(device.type, asked.dtype, cache_enabled=stage < 3)
