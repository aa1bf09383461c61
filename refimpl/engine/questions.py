"""What an engine's configuration says, under DeepSpeed's names: by a table of keys, and what takes a word more.

`engine.zero_reduce_bucket_size()` is the file's `zero_optimization.reduce_bucket_size`, or the default. None where the
section is not there. DeepSpeed: deepspeed/runtime/engine.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from refimpl.engine.configuration.zero_sections import OffloadOptimizer, OffloadParam
from refimpl.engine.names import DEEPSPEED_OPTIMIZERS
from refimpl.engine.state import TrainingState

ZERO = "zero_optimization."
KEYS = {
    "autotp_size": "tensor_parallel.autotp_size",
    "autotuning_enabled": "autotuning.enabled",
    "autotuning_end_profile_step": "autotuning.end_profile_step",
    "autotuning_metric": "autotuning.metric",
    "autotuning_start_profile_step": "autotuning.start_profile_step",
    "bfloat16_enabled": "bf16.enabled",
    "dataloader_drop_last": "dataloader_drop_last",
    "dump_state": "dump_state",
    "flops_profiler_detailed": "flops_profiler.detailed",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_module_depth": "flops_profiler.module_depth",
    "flops_profiler_output_file": "flops_profiler.output_file",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "flops_profiler_recompute_fwd_factor": "flops_profiler.recompute_fwd_factor",
    "flops_profiler_top_modules": "flops_profiler.top_modules",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "log_level": "log_level",
    "loss_scale": "fp16.loss_scale",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "memory_breakdown": "memory_breakdown",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "steps_per_print": "steps_per_print",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "zero_allgather_bucket_size": ZERO + "allgather_bucket_size",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_gather_16bit_weights_on_model_save": ZERO + "stage3_gather_16bit_weights_on_model_save",
    "zero_hpz_partition_size": ZERO + "zero_hpz_partition_size",
    "zero_ignore_unused_parameters": ZERO + "ignore_unused_parameters",
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


class Questions(TrainingState):
    """Nothing here changes anything."""

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """dtype of the parameters, and of accumulated gradients."""
        return self._config.dtype, self._config.data_types.grad_accum_dtype or self._config.dtype

    def dynamic_loss_scale(self) -> bool:
        """Whether fp16's loss scale adapts itself."""
        return self._config.fp16.enabled and self._config.fp16.loss_scale == 0

    def zero_optimization_stage(self) -> int:
        """0 (nothing sharded) to 3 (parameters sharded)."""
        return self._config.zero_optimization.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.zero_optimization_stage() == 3

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer states live in host memory."""
        return self._config.zero_optimization.offload_optimizer.device == "cpu"

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called, of the engine or of its model."""
        return self.module._compiled_call_impl is not None

    @property
    def basic_optimizer(self) -> Optimizer | None:
        """The optimizer inside DeepSpeed's own; here `optimizer` is that one."""
        return self.optimizer

    def optimizer_name(self) -> str | None:
        """The name in the configuration, DeepSpeed's own in lower case as there; without one the optimizer's class."""
        if self._config.optimizer is None:
            return type(self.optimizer).__name__ if self.optimizer else None
        name = self._config.optimizer.type
        return name.lower() if name.lower() in DEEPSPEED_OPTIMIZERS else name

    def zero_overlap_comm(self) -> bool:
        """Whether gradients are reduced while backward still computes."""
        return self.stage.config.overlap_comm

    def zero_offload_optimizer(self) -> Any:
        """The section, None where nothing is offloaded."""
        return if_away(self._config.zero_optimization.offload_optimizer)

    def zero_offload_param(self) -> Any:
        """The section, None where nothing is offloaded."""
        return if_away(self._config.zero_optimization.offload_param)

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the update runs at the host: optimizer states are offloaded, to its memory or to a disk."""
        return self.zero_offload_optimizer() is not None

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """None where forward does not run under autocast."""
        asked = self._config.torch_autocast
        return asked.dtype if asked.enabled else None

    def postscale_gradients(self) -> bool:
        """Whether gradients are divided behind their sum."""
        return not self._config.prescale_gradients

    @property
    def communication_data_type(self) -> torch.dtype:
        """dtype of gradients on the wire."""
        return self._config.communication_data_type or self.get_data_types()[1]

    def get_data_parallel_rank(self) -> int:
        """Which of the batches this rank reads."""
        return self.axes.feed

    def get_tensor_parallel_rank(self) -> int:
        """Which part of every layer this rank has; `get_model_parallel_rank` too."""
        return self.axes.tensor.rank

    get_model_parallel_rank = get_tensor_parallel_rank

    def get_sequence_parallel_group(self) -> ProcessGroup | None:
        """torch's group of the ranks that share sequences; None where none do."""
        return self.axes.context.handle

    def _no(self) -> bool:
        """False: `data_efficiency` is not part of this project, and an optimizer has nothing to do before a save."""
        return False

    data_efficiency_enabled = data_sampling_enabled = curriculum_learning_enabled = random_ltd_enabled = _no
    _optimizer_has_ckpt_event_prologue = _optimizer_has_ckpt_event_epilogue = _no


def if_away(section: OffloadOptimizer | OffloadParam) -> Any:
    return None if section.device == "none" else section


def question(name: str, key: str) -> Callable[[Questions], Any]:
    def answer(engine: Questions) -> Any:
        value: Any = engine._config
        for part in key.split("."):
            value = None if value is None else getattr(value, part)
        return value

    answer.__name__, answer.__doc__ = name, f"The configuration's `{key}`."
    return answer


for name, path in KEYS.items():
    setattr(Questions, name, question(name, path))
