"""What a script asks an engine about its batch and its ranks, under DeepSpeed's names; two sizes it may change.

DeepSpeed's file: deepspeed/runtime/engine.py.
"""

from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, Dataset

from refimpl.engine.build import Parts
from refimpl.engine.curriculum import Told
from refimpl.engine.dataloader import make_dataloader
from refimpl.engine.questions import Questions
from refimpl.optim.curriculum import CurriculumScheduler
from refimpl.optim.layer_drop import ProgressiveLayerDrop


class Asked(Questions):
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
