"""DeepSpeed's own spelling: a training script changes one line, `import refimpl.deepspeed as deepspeed`.

    deepspeed.initialize, init_distributed, add_config_arguments, DeepSpeedEngine, DeepSpeedConfig
    deepspeed.zero.Init, zero.GatheredParameters        refimpl/zero/init.py
    deepspeed.comm.get_rank, get_world_size, barrier    this job's ranks; one rank when there was no launcher
    deepspeed.ops.adam.FusedAdam, DeepSpeedCPUAdam      torch's fused AdamW, with DeepSpeed's defaults
    deepspeed.get_accelerator()                         the device's name and number

Start the ranks with torchrun; without it the script runs as one process. Not one idea lives here.
DeepSpeed's files: deepspeed/__init__.py, comm/comm.py, ops/adam/fused_adam.py, accelerator/.
"""

import argparse
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from refimpl.comm.group import Group
from refimpl.engine.build import named_optimizer
from refimpl.engine.config import DeepSpeedConfig
from refimpl.engine.dataloader import RepeatingLoader
from refimpl.engine.engine import Engine as DeepSpeedEngine
from refimpl.engine.initialize import connect, initialize
from refimpl.engine.read import read_json
from refimpl.zero import init

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedEngine",
    "RepeatingLoader",
    "add_config_arguments",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "ops",
    "zero",
]


def init_distributed(dist_backend: str | None = None, dist_init_required: bool | None = None) -> None:
    """Join the launcher's ranks, if there is a launcher and they are not joined yet.

    The backend follows from the machine: nccl with a GPU for every rank, gloo otherwise. ValueError for a
    `dist_backend` that is neither None nor the one that it follows to.
    """
    backend = connect(dist_init_required).backend
    if dist_backend not in (None, backend) and backend != "none":
        raise ValueError(f"init_distributed: dist_backend={dist_backend!r}, but the ranks here are joined by {backend}")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed`, a flag for the script's own use, and `--deepspeed_config FILE`, which `initialize` reads."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="a flag for the script; changes nothing by itself")
    group.add_argument("--deepspeed_config", metavar="FILE", help="DeepSpeed JSON configuration")
    return parser


def Init(
    config_dict_or_path: Mapping[str, Any] | str | Path | None = None,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
) -> init.Init:
    """Shard a model while it is built, over the launcher's ranks, in `dtype` or the dtype that the configuration says.

    Without either it is built in its own dtype and cast by `initialize`: the same bits, more memory on the way.
    """
    if dtype is None and config_dict_or_path is not None:
        raw = config_dict_or_path
        raw = raw if isinstance(raw, Mapping) else read_json(Path(raw))
        enabled_dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = next((d for key, d in enabled_dtypes.items() if raw.get(key, {}).get("enabled") is True), None)
    return init.Init(connect(), dtype, enabled)


zero = SimpleNamespace(Init=Init, GatheredParameters=init.GatheredParameters)


def FusedAdam(
    params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """torch.optim.AdamW, or Adam without `adam_w_mode`, fused, on any device."""
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    options |= {"bias_correction": bias_correction, "adam_w_mode": adam_w_mode}
    return named_optimizer("Adam", list(params), options)


def DeepSpeedCPUAdam(params: Iterable[Any], adamw_mode: bool = True, **options: Any) -> torch.optim.Optimizer:
    """FusedAdam under its other name and with DeepSpeed's other spelling of `adam_w_mode`."""
    return FusedAdam(params, adam_w_mode=adamw_mode, **options)


ops = SimpleNamespace(adam=SimpleNamespace(FusedAdam=FusedAdam, DeepSpeedCPUAdam=DeepSpeedCPUAdam))


class comm:
    """The world of this process, in torch.distributed's words. For collectives on tensors use a `Group`."""

    init_distributed = staticmethod(init_distributed)

    @staticmethod
    def is_initialized() -> bool:
        """Whether this process has joined a launcher's ranks."""
        return dist.is_initialized()

    @staticmethod
    def get_rank() -> int:
        """This process's number, 0 without a launcher."""
        return Group.world().rank

    @staticmethod
    def get_world_size() -> int:
        """How many ranks there are, 1 without a launcher."""
        return Group.world().size

    @staticmethod
    def get_local_rank() -> int:
        """This process's number on its machine, 0 without a launcher."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @staticmethod
    def barrier() -> None:
        """Return when every rank has come here."""
        Group.world().barrier()


class get_accelerator:
    """The device that this rank computes on, in the words that DeepSpeed's examples use."""

    def current_device_name(self) -> str:
        """ "cpu", or "cuda:0"."""
        return str(Group.world().device)

    def device_name(self, index: int | None = None) -> str:
        """ "cpu", or "cuda", or "cuda:1" for index 1."""
        kind = Group.world().device.type
        return kind if index is None or kind == "cpu" else f"{kind}:{index}"

    def communication_backend_name(self) -> str:
        """ "nccl" where ranks have a GPU each, else "gloo"."""
        return "nccl" if Group.world().device.type == "cuda" else "gloo"
