"""From `offload_optimizer`, `offload_param` and `aio` to the homes of a stage's shards.

    device    on a CPU                              on a GPU
    none      stays                                 stays
    cpu       stays: it is in the host's memory     `Host`: masters, state and update, from stage 2 on the shards of
                                                    gradients; shards of parameters
    nvme      a file of each rank; from stage 2 on  the same
              the shards of gradients wait there

The masters of parameters that rest elsewhere are in the host's memory, if not on a disk.
With delayed_update gradients wait in memory: of the host, beside a GPU.
DeepSpeed: deepspeed/runtime/zero/offload_config.py, deepspeed/runtime/swap_tensor/aio_config.py.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from refimpl.checkpoint.errors import explained, together
from refimpl.comm.group import Group
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.schema import DeepSpeedConfig
from refimpl.engine.configuration.zero_sections import OffloadOptimizer, OffloadParam
from refimpl.offload.blocks import Aio, OffloadError
from refimpl.offload.homes import Disk, Host
from refimpl.zero.config import ZeroConfig

T = TypeVar("T")


def with_homes(zero: ZeroConfig, settings: DeepSpeedConfig, device: torch.device, world: Group) -> ZeroConfig:
    """`zero` with the homes that the configuration asks for, each opened. ConfigError names the key.

    OffloadError on every rank of `world`, all ranks, if one cannot use its folder. A collective if there is a disk.
    """
    section, aio = settings.zero_optimization, asked_aio(settings)
    optimizer, param = section.offload_optimizer, section.offload_param
    size = section.sub_group_size or ZeroConfig.sub_group_size
    size = min(max(size, aio.block_size // 4), 1 << 40)  # elements: no part is smaller than one request
    zero = replace(zero, sub_group_size=size, offload_ratio=optimizer.ratio)
    late = optimizer.delayed_update
    if late and (optimizer.device == "none" or optimizer.ratio < 1 or param.device != "none"):
        raise ConfigError(
            "zero_optimization.offload_optimizer.delayed_update needs device 'cpu' or 'nvme', ratio 1 and no "
            "offload_param: the next step reads parameters while the update under way would write them"
        )
    gradients_leave = section.stage >= 2 and device.type != "cpu"  # ZeRO-Offload: from the GPU, inside backward
    if optimizer.device == "nvme":
        ways = optimizer.pipeline_read + optimizer.pipeline_write
        buffers = optimizer.buffer_count if ways == 2 else min(optimizer.buffer_count, 1 + ways)
        disk = opened(world, "offload_optimizer", optimizer, buffers, aio)
        # As in DeepSpeed, gradients wait where they will be used.
        in_memory = Host() if gradients_leave else None
        gradients = disk if section.stage >= 2 and not late else in_memory
        zero = replace(zero, optimizer_home=disk, gradient_home=gradients, delayed_update=late)
    elif param.device == "nvme" or late or (device.type != "cpu" and "cpu" in (optimizer.device, param.device)):
        gradients = Host() if gradients_leave and optimizer.device == "cpu" else None
        zero = replace(zero, optimizer_home=Host(), gradient_home=gradients, delayed_update=late)
    if param.device == "nvme":
        most = param.buffer_size * (zero.dtype or torch.float32).itemsize
        home = opened(world, "offload_param", param, param.buffer_count, aio, most)
        zero = replace(zero, parameter_home=home, max_in_host=param.max_in_cpu)
    elif param.device == "cpu" and device.type != "cpu":
        zero = replace(zero, parameter_home=Host())
    return zero


def asked_aio(settings: DeepSpeedConfig) -> Aio:
    """The `aio` section."""
    aio = settings.aio
    depth = aio.queue_depth if aio.overlap_events else 1
    return Aio(aio.block_size, depth, aio.intra_op_parallelism if aio.overlap_events else 1)


def opened(world: Group, key: str, section: OffloadOptimizer | OffloadParam, *of_disk: Any) -> Disk:
    """Each rank's file in `nvme_path`, which is made if it is not there."""
    if not section.nvme_path:
        raise ConfigError(f"zero_optimization.{key}.device = 'nvme' needs a folder: set {key}.nvme_path")
    path = Path(section.nvme_path)

    def on_this_rank() -> Disk:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"zero_optimization.{key}.nvme_path = {str(path)!r}: {explained(error)}") from error
        return Disk(path, *of_disk)

    return together(world, on_this_rank, OffloadError)


def heard_by_all(world: Group, build: Callable[[], T]) -> T:
    """build(), of which a disk may fail some ranks, in groups: then OffloadError on every rank of `world`."""
    result = failure = None
    try:
        result = build()
    except OffloadError as error:
        failure = error
    said = world.all_gather_object(None if failure is None else str(failure))
    if any(said):
        raise OffloadError("; ".join(dict.fromkeys(filter(None, said)))) from failure
    return result  # type: ignore[return-value]
