"""DeepSpeed's engine room by its module paths; each module names the one of refimpl that does the work."""

from refimpl.deepspeed.runtime import (
    activation_checkpointing,
    bf16_optimizer,
    config,
    config_utils,
    constants,
    data_pipeline,
    dataloader,
    engine,
    fp16,
    lr_schedules,
    pipe,
    progressive_layer_drop,
    utils,
    zero,
)

__all__ = [
    "activation_checkpointing", "bf16_optimizer", "config", "config_utils", "constants", "data_pipeline", "dataloader",
    "engine", "fp16", "lr_schedules", "pipe", "progressive_layer_drop", "utils", "zero",
]  # fmt: skip
