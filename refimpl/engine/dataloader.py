"""The training data of one rank: a shuffled share of the dataset, another order every epoch, forever if asked.

Every rank draws the same permutation (same seed, same epoch) and takes every N-th sample of it, so the ranks' shares
are disjoint without a word between them. DeepSpeed's file: deepspeed/runtime/dataloader.py.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset


class EpochSampler(DistributedSampler[Any]):
    """A DistributedSampler that moves on to the next epoch's order by itself; `set_epoch` still overrides it."""

    def __iter__(self) -> Iterator[Any]:
        order = super().__iter__()
        self.epoch += 1
        return order


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
) -> DataLoader[Any]:
    """Micro-batches of `micro_batch` samples for this rank.

    An IterableDataset has no indices to share out: it is taken as it is and must give each rank its own samples.
    `drop_last` drops an incomplete last micro-batch. Batches are loaded in this process: the ranks are the workers.
    """
    sampler = None if isinstance(dataset, IterableDataset) else EpochSampler(dataset, num_replicas=ranks, rank=rank)
    return DataLoader(dataset, batch_size=micro_batch, sampler=sampler, drop_last=drop_last, collate_fn=collate_fn)
