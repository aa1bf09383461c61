"""`deepspeed.checkpointing.checkpoint`: torch's, which every stage supports. Its options are not implemented yet.

DeepSpeed: deepspeed/runtime/activation_checkpointing/checkpointing.py.
"""

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), computed again in backward instead of kept."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


def is_configured() -> bool:
    """False: scripts then use torch.utils.checkpoint themselves."""
    return False


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Nothing, when nothing is asked for; NotImplementedError names the option otherwise."""
    asked = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    wanted = [name for name, value in asked.items() if value]
    if wanted:
        raise NotImplementedError(
            f"deepspeed.checkpointing.configure: {', '.join(wanted)}: not implemented yet; leave it out, "
            "or use torch.utils.checkpoint in the model"
        )


def reset() -> None:
    """Nothing is kept between iterations."""
