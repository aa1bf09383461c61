"""Helpers for whoever saves weights by hand, and the converter that has nothing left to do."""

from refimpl.deepspeed.absent import absent
from refimpl.deepspeed.checkpoint import constants, ds_to_universal, utils
from refimpl.deepspeed.checkpoint.constants import (
    ORIGINAL_VOCAB_SIZE,
    PADDED_VOCAB_SIZE,
    PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
    PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    PIPELINE_REPLICATED_PARAMETER_PATTERNS,
    TP_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
    VOCABULARY_PARAMETER_PATTERNS,
)

__all__ = [
    "ORIGINAL_VOCAB_SIZE", "PADDED_VOCAB_SIZE", "PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0",
    "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS", "PIPELINE_REPLICATED_PARAMETER_PATTERNS",
    "TP_REPLICATED_PARAMETER_PATTERNS", "UNIVERSAL_CHECKPOINT_INFO", "UNIVERSAL_CHECKPOINT_VERSION_KEY",
    "UNIVERSAL_CHECKPOINT_VERSION_VALUE", "VOCABULARY_PARAMETER_PATTERNS", "DeepSpeedCheckpoint", "constants",
    "ds_to_universal", "utils",
]  # fmt: skip

DeepSpeedCheckpoint = absent(
    "deepspeed.checkpoint.DeepSpeedCheckpoint",
    "a checkpoint goes on in any layout as it is; `refimpl checkpoint export` writes whole weights, `import` reads "
    "DeepSpeed's files",
)
