"""The names of the section's keys, and what holds where a key is not set. DeepSpeed: elasticity/constants.py."""

from refimpl.engine.configuration.elasticity import SCHEDULER
from refimpl.engine.configuration.sections import Elasticity

_DEFAULTS = {name: field.default for name, field in Elasticity.model_fields.items()}

ELASTICITY = "elasticity"
LATEST_ELASTICITY_VERSION = 0.2
MINIMUM_DEEPSPEED_VERSION = "0.3.8"
DEEPSPEED_ELASTICITY_CONFIG = SCHEDULER

ENABLED = "enabled"
MAX_ACCEPTABLE_BATCH_SIZE = "max_train_batch_size"  # required, as are the next
MICRO_BATCHES = "micro_batch_sizes"
MIN_GPUS = "min_gpus"
MAX_GPUS = "max_gpus"
NUM_GPUS_PER_NODE = "num_gpus_per_node"
MODEL_PARALLEL_SIZE = "model_parallel_size"
MIN_TIME = "min_time"
PREFER_LARGER_BATCH = "prefer_larger_batch"
IGNORE_NON_ELASTIC_BATCH_INFO = "ignore_non_elastic_batch_info"
VERSION = "version"

ENABLED_DEFAULT = _DEFAULTS[ENABLED]
MIN_GPUS_DEFAULT = _DEFAULTS[MIN_GPUS]
MAX_GPUS_DEFAULT = _DEFAULTS[MAX_GPUS]
NUM_GPUS_PER_NODE_DEFAULT = _DEFAULTS[NUM_GPUS_PER_NODE]
MODEL_PARALLEL_SIZE_DEFAULT = _DEFAULTS[MODEL_PARALLEL_SIZE]
MIN_TIME_DEFAULT = 0
PREFER_LARGER_BATCH_DEFAULT = _DEFAULTS[PREFER_LARGER_BATCH]
IGNORE_NON_ELASTIC_BATCH_INFO_DEFAULT = _DEFAULTS[IGNORE_NON_ELASTIC_BATCH_INFO]
VERSION_DEFAULT = _DEFAULTS[VERSION]
