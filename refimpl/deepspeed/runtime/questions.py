"""What DeepSpeed's engine answers about one key of its file each, by a table. What scripts ask often: engine/asked.py.

`engine.zero_reduce_bucket_size()` is the file's `zero_optimization.reduce_bucket_size`, or the default. None where the
section is not there. DeepSpeed: deepspeed/runtime/engine.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from refimpl.engine.configuration.sections import OffloadOptimizer, OffloadParam
from refimpl.engine.engine import Engine
from refimpl.engine.pipeline import PipelineEngine

ZERO = "zero_optimization."
KEYS = {
    "autotuning_enabled": "autotuning.enabled",
    "autotuning_end_profile_step": "autotuning.end_profile_step",
    "autotuning_metric": "autotuning.metric",
    "autotuning_start_profile_step": "autotuning.start_profile_step",
    "dataloader_drop_last": "dataloader_drop_last",
    "flops_profiler_detailed": "flops_profiler.detailed",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_module_depth": "flops_profiler.module_depth",
    "flops_profiler_output_file": "flops_profiler.output_file",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "flops_profiler_recompute_fwd_factor": "flops_profiler.recompute_fwd_factor",
    "flops_profiler_top_modules": "flops_profiler.top_modules",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "log_level": "log_level",
    "optimizer_params": "optimizer.params",
    "scheduler_params": "scheduler.params",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "zero_allgather_bucket_size": ZERO + "allgather_bucket_size",
    "zero_hpz_partition_size": ZERO + "zero_hpz_partition_size",
    "zero_max_live_parameters": ZERO + "stage3_max_live_parameters",
    "zero_max_reuse_distance": ZERO + "stage3_max_reuse_distance",
    "zero_model_persistence_threshold": ZERO + "stage3_model_persistence_threshold",
    "zero_module_granularity_threshold": ZERO + "stage3_module_granularity_threshold",
    "zero_param_persistence_threshold": ZERO + "stage3_param_persistence_threshold",
    "zero_prefetch_bucket_size": ZERO + "stage3_prefetch_bucket_size",
    "zero_quantized_gradients": ZERO + "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights": ZERO + "zero_quantized_nontrainable_weights",
    "zero_quantized_weights": ZERO + "zero_quantized_weights",
    "zero_reduce_bucket_size": ZERO + "reduce_bucket_size",
    "zero_sub_group_size": ZERO + "sub_group_size",
}


def question(name: str, key: str) -> Callable[[Engine], Any]:
    def answer(engine: Engine) -> Any:
        value: Any = engine._config
        for part in key.split("."):
            value = None if value is None else getattr(value, part)
        return value

    answer.__name__, answer.__doc__ = name, f"The configuration's `{key}`."
    return answer


def zero_overlap_comm(engine: Engine) -> bool:
    """Whether gradients are reduced while backward still computes."""
    return engine.stage.config.overlap_comm


def zero_offload_optimizer(engine: Engine) -> Any:
    """The section, None where nothing is offloaded."""
    return if_away(engine._config.zero_optimization.offload_optimizer)


def zero_offload_param(engine: Engine) -> Any:
    """The section, None where nothing is offloaded."""
    return if_away(engine._config.zero_optimization.offload_param)


def zero_use_cpu_optimizer(engine: Engine) -> bool:
    """Whether the update runs at the host: optimizer states are offloaded, to its memory or to a disk."""
    return zero_offload_optimizer(engine) is not None


def if_away(section: OffloadOptimizer | OffloadParam) -> Any:
    return None if section.device == "none" else section


def torch_autocast_dtype(engine: Engine) -> torch.dtype | None:
    """None where forward does not run under autocast."""
    asked = engine._config.torch_autocast
    return asked.dtype if asked.enabled else None


def postscale_gradients(engine: Engine) -> bool:
    """Whether gradients are divided behind their sum."""
    return not engine._config.prescale_gradients


def communication_data_type(engine: Engine) -> torch.dtype:
    """dtype of gradients on the wire."""
    return engine._config.communication_data_type or engine.get_data_types()[1]


def get_data_parallel_rank(engine: Engine) -> int:
    """Which of the batches this rank reads."""
    return engine.axes.feed


def get_tensor_parallel_rank(engine: Engine) -> int:
    """Which part of every layer this rank has; `get_model_parallel_rank` too."""
    return engine.axes.tensor.rank


def get_sequence_parallel_group(engine: Engine) -> ProcessGroup | None:
    """torch's group of the ranks that share sequences; None where none do."""
    return engine.seq_parallel_group


def get_pipeline_parallel_rank(engine: PipelineEngine) -> int:
    """Which of the stages this rank is."""
    return engine.stage_id


def no(engine: Engine) -> bool:
    """False: `data_efficiency` is not part of this project, and an optimizer has nothing to do before a save."""
    return False


for name, path in KEYS.items():
    setattr(Engine, name, question(name, path))
for written in (
    zero_overlap_comm, zero_offload_optimizer, zero_offload_param, zero_use_cpu_optimizer, torch_autocast_dtype,
    postscale_gradients, get_data_parallel_rank, get_tensor_parallel_rank, get_sequence_parallel_group,
):  # fmt: skip
    setattr(Engine, written.__name__, written)
setattr(Engine, "get_model_parallel_rank", get_tensor_parallel_rank)  # noqa: B010
setattr(PipelineEngine, "get_pipeline_parallel_rank", get_pipeline_parallel_rank)  # noqa: B010
for name in (
    "data_efficiency_enabled", "data_sampling_enabled", "curriculum_learning_enabled", "random_ltd_enabled",
    "_optimizer_has_ckpt_event_prologue", "_optimizer_has_ckpt_event_epilogue",
):  # fmt: skip
    setattr(Engine, name, no)
setattr(Engine, "communication_data_type", property(communication_data_type))  # noqa: B010
