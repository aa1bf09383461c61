"""What a script asks an engine about its configuration, under DeepSpeed's names, and the two sizes that it may change.

DeepSpeed's file: deepspeed/runtime/engine.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from refimpl.engine.build import Parts
from refimpl.engine.curriculum import Told
from refimpl.engine.dataloader import make_dataloader
from refimpl.engine.names import DEEPSPEED_OPTIMIZERS
from refimpl.engine.state import TrainingState
from refimpl.optim.curriculum import CurriculumScheduler
from refimpl.optim.layer_drop import ProgressiveLayerDrop


class Asked(TrainingState):
    """The questions; an `Engine` answers them."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.told = Told(parts.config.progressive_layer_drop, parts.config.curriculum_learning)

    # What the model is told.

    @property
    def progressive_layer_drop(self) -> ProgressiveLayerDrop | None:
        """What the configuration's `progressive_layer_drop` asks for; None where it does not."""
        return self.told.drop

    @property
    def curriculum_scheduler_legacy(self) -> CurriculumScheduler | None:
        """What `curriculum_learning` asks for; its name in DeepSpeed, where data_efficiency has another."""
        return self.told.curriculum

    def get_pld_theta(self) -> float | None:
        """The share of layers that the last update's forward was told; None without `progressive_layer_drop`."""
        if self.told.drop is None:
            return None
        self.told.at(self.global_steps)
        return self.told.drop.get_theta()

    # The batch.

    def train_batch_size(self) -> int:
        """Samples in an optimizer step, over all ranks."""
        return self._config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples in one forward of one rank."""
        return self._config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one rank in an optimizer step."""
        return self._config.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """The three above. (DeepSpeed returns its three methods.)"""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def elasticity_enabled(self) -> bool:
        """Whether the section `elasticity` has chosen them."""
        return self._config.elasticity is not None

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of an optimizer step by the number of micro-batches. ValueError if that is not whole."""
        once = self.train_micro_batch_size_per_gpu() * self.axes.feeds
        if train_batch_size < once or train_batch_size % once:
            raise ValueError(
                f"set_train_batch_size({train_batch_size}): not a multiple of micro-batch "
                f"{self.train_micro_batch_size_per_gpu()} x world size {self.axes.feeds} = {once}"
            )
        self._set_sizes(self.train_micro_batch_size_per_gpu(), train_batch_size // once)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of a micro-batch, and so of a step: the client's own loader gives as many from now on."""
        if micro_batch_size < 1:
            raise ValueError(f"set_train_micro_batch_size({micro_batch_size}): must be at least 1")
        self._set_sizes(micro_batch_size, self.gradient_accumulation_steps())

    def _set_sizes(self, micro: int, steps: int) -> None:
        sizes = {
            "train_batch_size": micro * steps * self.axes.feeds,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": steps,
        }
        self._config = self._config.model_copy(update=sizes)
        self.stage.gradients.divisor = steps

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader of another data set: this rank's micro-batches, of `batch_size` samples or as many as in training.

        route: "train" shuffles, "eval" and "predict" keep the data's order. Without `collate_fn` it is `initialize`'s.
        Without effect: pin_memory, and num_local_io_workers, as batches are loaded in this process.
        NotImplementedError for a data_sampler: give torch's DataLoader that one.
        """
        if data_sampler is not None:
            raise NotImplementedError("deepspeed_io: data_sampler: give it to torch.utils.data.DataLoader yourself")
        size, drop_last = batch_size or self.train_micro_batch_size_per_gpu(), self._config.dataloader_drop_last
        collate_fn, shuffle = collate_fn or self.collate_fn, route == "train"
        return make_dataloader(dataset, size, self.axes.feed, self.axes.feeds, drop_last, collate_fn, shuffle)

    @property
    def dp_world_size(self) -> int:
        """Ranks that read different batches."""
        return self.axes.feeds

    world_size = data_parallel_size = dp_world_size

    @property
    def mp_world_size(self) -> int:
        """Ranks that share every layer."""
        return self.axes.tensor.size

    def autotp_size(self) -> int:
        """The same, as the configuration or `tp_model_init` asked for it; 0 without tensor parallelism."""
        return self._config.tensor_parallel.autotp_size

    @property
    def data_parallel_group(self) -> ProcessGroup | None:
        """torch's group of the ranks that read different batches; None where there is one."""
        return self.axes.data.handle

    @property
    def seq_parallel_group(self) -> ProcessGroup | None:
        """torch's group of the ranks that share sequences; None where none do."""
        return self.axes.context.handle

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """The weights whose gradients travel sparse: none, they are made dense before they are reduced."""
        return set()

    @property
    def global_rank(self) -> int:
        """This process's number."""
        return self.axes.world.rank

    # Numbers.

    def fp16_enabled(self) -> bool:
        """Whether the model is trained in fp16."""
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether the model is trained in bf16."""
        return self._config.bf16.enabled

    def fp16_auto_cast(self) -> bool:
        """Whether inputs are cast to fp16."""
        return self._config.fp16.auto_cast

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """dtype of the parameters, and of accumulated gradients."""
        return self._config.dtype, self._config.data_types.grad_accum_dtype or self._config.dtype

    def dynamic_loss_scale(self) -> bool:
        """Whether fp16's loss scale adapts itself."""
        return self._config.fp16.enabled and self._config.fp16.loss_scale == 0

    def loss_scale(self) -> float:
        """The configured static loss scale; 0 is dynamic. The one in force is `optimizer.loss_scale`."""
        return self._config.fp16.loss_scale

    def gradient_clipping(self) -> float:
        """Bound on the global gradient norm; 0 does not clip."""
        return self._config.gradient_clipping

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts micro-batches."""
        return self._config.managed_gradient_accumulation

    # What is sharded.

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

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether `save_16bit_model` may gather the weights of stage 3."""
        return self._config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def zero_ignore_unused_parameters(self) -> bool:
        """Whether a parameter may have no gradient."""
        return self._config.zero_optimization.ignore_unused_parameters

    def zero_allow_untested_optimizer(self) -> bool:
        """Whether an optimizer that is not known to be element-wise is taken."""
        return self._config.zero_allow_untested_optimizer

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer states live in host memory."""
        return self._config.zero_optimization.offload_optimizer.device == "cpu"

    # The rest.

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

    def scheduler_name(self) -> str | None:
        """The schedule's name in the configuration."""
        return self._config.scheduler.type if self._config.scheduler else None

    def steps_per_print(self) -> int | None:
        """Steps between two reports."""
        return self._config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether times are reported."""
        return self._config.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        """Whether bytes are reported."""
        return self._config.memory_breakdown

    def dump_state(self) -> bool:
        """Whether the configuration was printed at the start."""
        return self._config.dump_state
