"""Data loading under DeepSpeed's names. DeepSpeed: runtime/dataloader.py; ours: refimpl/engine/dataloader.py."""

from collections.abc import Callable, Sized
from typing import Any

from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from refimpl.engine.dataloader import RepeatingLoader, TrainingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]


class Loader(type):
    """What an engine makes of training_data is one of these too: a DataLoader."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, DataLoader)


class DeepSpeedDataLoader(TrainingLoader, metaclass=Loader):
    """A rank's share of a dataset that a script shares out by hand (h2o-llmstudio, for its validation).

    data_sampler: else a DistributedSampler over the data-parallel ranks, or with local_rank -1 a RandomSampler.
    num_local_io_workers: else batches are loaded in this process (DeepSpeed: by two others). `tput_timer` is not
    started: engines time their own steps.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Sampler[Any] | None = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
    ) -> None:
        if data_sampler is None and local_rank >= 0:
            data_sampler = DistributedSampler(dataset, data_parallel_world_size, data_parallel_rank)
        elif data_sampler is None:
            assert isinstance(dataset, Sized)
            data_sampler = RandomSampler(dataset)
        super().__init__(
            dataset,
            batch_size,
            sampler=data_sampler,
            num_workers=num_local_io_workers or 0,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=dataloader_drop_last,
        )
