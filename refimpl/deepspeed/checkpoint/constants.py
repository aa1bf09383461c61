"""Keys in checkpoints, for who reads DeepSpeed's by hand, as its zero_to_fp32.py; and those of a client_state.

The second kind is what Megatron-DeepSpeed writes for the converter. DeepSpeed: deepspeed/checkpoint/constants.py.
"""

OPTIMIZER_STATE_DICT, BASE_OPTIMIZER_STATE, PARAM_GROUPS = (
    "optimizer_state_dict",
    "base_optimizer_state",
    "param_groups",
)
FP32_FLAT_GROUPS, SINGLE_PARTITION_OF_FP32_GROUPS = "fp32_flat_groups", "single_partition_of_fp32_groups"
ZERO_STAGE, PARTITION_COUNT, GROUP_PADDINGS = "zero_stage", "partition_count", "group_paddings"
CLIP_GRAD, LOSS_SCALER, DS_VERSION = "clip_grad", "loss_scaler", "ds_version"
PARAM_SHAPES, BUFFER_NAMES, CAT_DIM = "param_shapes", "buffer_names", "cat_dim"
FROZEN_PARAM_SHAPES, FROZEN_PARAM_FRAGMENTS = "frozen_param_shapes", "frozen_param_fragments"

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY, UNIVERSAL_CHECKPOINT_VERSION_VALUE = "universal_checkpoint_version", 0.4
ORIGINAL_VOCAB_SIZE, PADDED_VOCAB_SIZE = "original_vocab_size", "padded_vocab_size"
VOCABULARY_PARAMETER_PATTERNS = "vocabulary_parameter_patterns"
PIPELINE_REPLICATED_PARAMETER_PATTERNS = "pipeline_replicated_parameter_patterns"
TP_REPLICATED_PARAMETER_PATTERNS = "tp_replicated_parameter_patterns"
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS = "parameter_with_row_parallelism_patterns"
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 = "parameter_with_2_sub_params_cat_dim_0"
