"""A model made ready for its stage: sparse attention in the place of its own, its device, the dtypes of its buffers.

DeepSpeed: deepspeed/runtime/keep_in_fp32.py and `_cast_module_mixed_precision` of deepspeed/runtime/engine.py.
"""

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from refimpl.comm.axes import Axes
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.schema import DeepSpeedConfig
from refimpl.engine.configuration.sections import SparseAttention as SparseSection
from refimpl.model.patterns.named import pattern_named
from refimpl.model.sparse_swap import make_sparse
from refimpl.zero.gather.unit import Unit, unit_of, whole
from refimpl.zero.gather.units import make_whole
from refimpl.zero.parameter import place

IN_FP32 = {  # transformers' lists that count in a dtype
    torch.float16: ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    torch.bfloat16: ("_keep_in_fp32_modules_strict",),
}


def sparse(model: nn.Module, section: SparseSection, axes: Axes) -> None:
    """Exchange the model's attention for the section's pattern. ConfigError where that cannot be."""
    if axes.context.size > 1:
        raise ConfigError("sparse_attention: with sequence_parallel_size > 1 no rank has the sequence's other blocks")
    if axes.tensor.size > 1 and section.different_layout_per_head:
        raise ConfigError(
            "sparse_attention.different_layout_per_head: tensor ranks have some heads each; set it to false"
        )
    options = {**section.model_dump(exclude={"mode"}), "seed": 0}  # the same draws on all ranks
    try:
        make_sparse(model, lambda heads: pattern_named(section.mode, heads, options))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def place_model(model: nn.Module, config: DeepSpeedConfig, device: torch.device) -> None:
    """Move `model` to `device`, in place; the stage casts its parameters. Buffers keep their dtype, as in 0.19 (#8066).

    What `zero.Init` sharded is moved one unit at a time, and made whole for the stages that keep whole parameters.
    """
    sharded = {p: unit for p in model.parameters() if (unit := unit_of(p)) is not None}
    if config.zero_optimization.stage < 3:
        make_whole(list(sharded))
    else:
        for unit in dict.fromkeys(sharded.values()):  # in the same order on every rank, as a set would not be
            if unit.device != device:
                with whole(unit.params):
                    for p in unit.params:
                        place({p: p.data.to(device)}, nn.Parameter)
                    Unit(unit.params, unit.group, name=unit.name)
    if nowhere := [name for name, p in model.named_parameters() if p.is_meta]:
        raise ValueError(
            f"parameter {nowhere[0]} is on the meta device and has no values: call model.to_empty(device='cpu') and "
            "give it some, or build the model under zero.Init"
        )
    model.to(device)
    if (cast := config.zero_config().dtype) is not None:
        for module in model.modules():
            if isinstance(module, _BatchNorm | _InstanceNorm):  # torch has no kernel for two dtypes of these
                for name, buffer in module.named_buffers(recurse=False):
                    if buffer.is_floating_point():
                        module.register_buffer(name, buffer.to(cast))
    kept = set(kept_in_fp32(model, config))
    for buffer in model.buffers():
        dtype = torch.float32 if buffer in kept else config.data_types.buffer_dtype
        if buffer.is_floating_point() and dtype is not None:
            buffer.data = buffer.data.to(dtype)


def kept_in_fp32(model: nn.Module, config: DeepSpeedConfig) -> Iterator[Tensor]:
    """The buffers that the file names, or transformers' models: biases of routers whose values are close together."""
    listed = config.data_types.keep_in_fp32_modules
    lists = IN_FP32.get(config.dtype, ()) if listed is None else ()
    for module in model.modules() if listed is None else [model]:
        names = listed or [name for each in lists for name in getattr(module, each, None) or ()]
        pattern = "|".join(name.replace("*", ".*") for name in names)
        yield from (b for name, b in module.named_buffers() if names and re.search(pattern, name))
