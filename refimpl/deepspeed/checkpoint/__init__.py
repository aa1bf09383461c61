"""Helpers for whoever saves weights by hand, and the converter that has nothing left to do.

The names in capitals are keys that Megatron-DeepSpeed writes into its client_state for that converter.
"""

from refimpl.deepspeed.checkpoint import ds_to_universal, utils

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY, UNIVERSAL_CHECKPOINT_VERSION_VALUE = "universal_checkpoint_version", 0.4
ORIGINAL_VOCAB_SIZE, PADDED_VOCAB_SIZE = "original_vocab_size", "padded_vocab_size"
VOCABULARY_PARAMETER_PATTERNS = "vocabulary_parameter_patterns"
PIPELINE_REPLICATED_PARAMETER_PATTERNS = "pipeline_replicated_parameter_patterns"
TP_REPLICATED_PARAMETER_PATTERNS = "tp_replicated_parameter_patterns"
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS = "parameter_with_row_parallelism_patterns"
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 = "parameter_with_2_sub_params_cat_dim_0"

__all__ = [
    "ORIGINAL_VOCAB_SIZE",
    "PADDED_VOCAB_SIZE",
    "PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0",
    "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS",
    "PIPELINE_REPLICATED_PARAMETER_PATTERNS",
    "TP_REPLICATED_PARAMETER_PATTERNS",
    "UNIVERSAL_CHECKPOINT_INFO",
    "UNIVERSAL_CHECKPOINT_VERSION_KEY",
    "UNIVERSAL_CHECKPOINT_VERSION_VALUE",
    "VOCABULARY_PARAMETER_PATTERNS",
    "ds_to_universal",
    "utils",
]
