"""DeepSpeed's engine room by its module paths; each module names the one of refimpl that does the work."""

from refimpl.deepspeed.runtime import (
    activation_checkpointing,
    bf16_optimizer,
    config,
    dataloader,
    engine,
    fp16,
    lr_schedules,
    pipe,
    utils,
    zero,
)

__all__ = [
    "activation_checkpointing",
    "bf16_optimizer",
    "config",
    "dataloader",
    "engine",
    "fp16",
    "lr_schedules",
    "pipe",
    "utils",
    "zero",
]
