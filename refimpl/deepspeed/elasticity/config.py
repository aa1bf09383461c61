"""What is wrong with an elastic job, and the section as an object. DeepSpeed: elasticity/config.py."""

from collections.abc import Mapping
from typing import Any

from refimpl.deepspeed.elasticity.constants import MIN_TIME, MIN_TIME_DEFAULT
from refimpl.engine.configuration.elasticity import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    read,
)

__all__ = ["ElasticityConfig", "ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize"]


class ElasticityConfig:
    """The section's values, under the names that DeepSpeed's object has. ElasticityConfigError if it is off."""

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        section = read({"elasticity": param_dict})
        if section is None:
            raise ElasticityConfigError("elasticity.enabled is not true: there is no batch to choose")
        self.enabled = section.enabled
        self.max_acceptable_batch_size = section.max_train_batch_size
        self.micro_batches = section.micro_batch_sizes
        self.min_gpus, self.max_gpus = section.min_gpus, section.max_gpus
        self.num_gpus_per_node, self.model_parallel_size = section.num_gpus_per_node, section.model_parallel_size
        self.prefer_larger_batch_size = section.prefer_larger_batch
        self.ignore_non_elastic_batch_info = section.ignore_non_elastic_batch_info
        self.version = section.version
        self.min_time = param_dict.get(MIN_TIME, MIN_TIME_DEFAULT)
