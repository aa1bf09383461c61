"""The training data of one rank: a shuffled share of the dataset, another order every epoch, forever if asked.

Every rank draws the same permutation (same seed, same epoch) and takes every N-th sample of it, so the ranks' shares
are disjoint without a word between them. How far they have come is one number, the samples that all ranks together have
taken of this order: any number of ranks can go on behind it. DeepSpeed's file: deepspeed/runtime/dataloader.py, which
keeps no position; torchdata's StatefulDataLoader keeps one a rank.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate


class StatefulDistributedSampler(DistributedSampler[Any]):
    """torch's DistributedSampler that knows its position, and moves on to the next epoch's order by itself.

    An iterator begins behind what was taken of the epoch if it was restored, else at the beginning of the next one.
    `set_epoch` begins that epoch, unless it is the one that was restored: so a loop that calls it goes on where the
    saving run stood. The position counts what was drawn: a DataLoader with workers draws ahead of what it gives.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.taken = 0  # samples of this epoch's order, by all ranks
        self._begun = self._restored = False

    def set_epoch(self, epoch: int) -> None:
        if not (self._restored and epoch == self.epoch):
            self.taken = 0
        super().set_epoch(epoch)
        self._begun = False

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self.set_epoch(self.epoch + 1)
        self._begun, self._restored = True, False
        for index in self.order()[self.rank :: self.num_replicas]:
            self.taken += self.num_replicas
            yield index

    def order(self) -> list[int]:
        """The samples that are left of this epoch, for all ranks: as torch orders and pads (or cuts) them."""
        indices = list(range(len(self.dataset)))  # type: ignore[arg-type]
        if self.shuffle:
            draw = torch.Generator().manual_seed(self.seed + self.epoch)
            indices = torch.randperm(len(indices), generator=draw, device="cpu").tolist()
        left = indices[self.taken :]
        if self.drop_last:
            return left[: len(left) // self.num_replicas * self.num_replicas]
        missing = -len(left) % self.num_replicas
        return left + (indices * (missing // max(1, len(indices)) + 1))[:missing]

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many samples of its order all ranks together have taken: the same on every rank."""
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind `state_dict()`, of any number of ranks; behind a whole epoch with the next one."""
        size = len(self.dataset)  # type: ignore[arg-type]
        whole = state["taken"] >= size - (self.drop_last and self.num_replicas - 1)
        super().set_epoch(state["epoch"] + whole)
        self.taken = 0 if whole else state["taken"]
        self._begun, self._restored = False, True


class TrainingLoader(DataLoader[Any]):
    """torch's loader, whose sampler has DeepSpeed's name too: scripts call `loader.data_sampler.set_epoch(epoch)`."""

    @property
    def data_sampler(self) -> Any:
        return self.sampler


class RepeatingLoader:
    """An iterator over `loader` that starts again when it is exhausted, and so never ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> Any:
        for batch in self._batches:
            return batch
        self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            raise ValueError("RepeatingLoader: the loader has no batches to repeat") from None


def make_dataloader(
    dataset: Dataset[Any],
    micro_batch: int,
    rank: int,
    ranks: int,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    shuffle: bool = True,
) -> TrainingLoader:
    """Micro-batches of `micro_batch` samples for this rank.

    An IterableDataset has no indices to share out: it is taken as it is and must give each rank its own samples.
    `drop_last` drops an incomplete last micro-batch. shuffle: another order every epoch, else always the dataset's.
    Batches are loaded in this process: the ranks are the workers.
    """
    if isinstance(dataset, DataLoader):
        raise TypeError("training_data: a DataLoader: pass its dataset, of which a loader is made for each rank")
    stream = isinstance(dataset, IterableDataset)
    loader = TrainingLoader(
        dataset,
        batch_size=micro_batch,
        sampler=None if stream else StatefulDistributedSampler(dataset, ranks, rank, shuffle),
        drop_last=drop_last,
        collate_fn=collate_fn,
        generator=torch.Generator(),  # every iterator draws from it; torch's own stays as it was for who goes on
    )
    if not stream and len(loader) == 0:
        raise ValueError(
            f"training_data: {len(dataset)} samples make no micro-batch of {micro_batch} on each of {ranks} ranks"  # type: ignore[arg-type]
        )
    return loader


def first_batch(dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None) -> Any:
    """Two samples as a micro-batch, to see what the model does with it; None of a stream."""
    if isinstance(dataset, IterableDataset):
        return None
    samples = [dataset[0], dataset[len(dataset) - 1]]  # type: ignore[arg-type]
    return (collate_fn or default_collate)(samples)
