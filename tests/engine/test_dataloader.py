"""Each rank's share of the data: disjoint, complete, in another order every epoch."""

from collections.abc import Iterator
from itertools import chain

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from refimpl.engine.dataloader import RepeatingLoader, make_dataloader

DATA = TensorDataset(torch.arange(24))


def epoch(loader: object) -> list[int]:
    return [int(x) for (batch,) in loader for x in batch]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_shares_are_a_partition_and_change_every_epoch(ranks: int) -> None:
    loaders = [make_dataloader(DATA, 2, rank, ranks) for rank in range(ranks)]
    first, second = ([epoch(loader) for loader in loaders] for _ in range(2))
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(24))
    assert first != second
    loaders[0].sampler.set_epoch(0)
    assert epoch(loaders[0]) == first[0]


def test_drop_last() -> None:
    assert [len(b) for (b,) in make_dataloader(DATA, 5, 0, 2)] == [5, 5, 2]
    assert [len(b) for (b,) in make_dataloader(DATA, 5, 0, 2, drop_last=True)] == [5, 5]


def test_repeating_loader_never_ends() -> None:
    loader = RepeatingLoader(make_dataloader(DATA, 4, 0, 1))
    seen = [int(x) for _ in range(12) for x in next(loader)[0]]
    assert sorted(seen[:24]) == sorted(seen[24:]) == list(range(24))
    assert seen[:24] != seen[24:]
    with pytest.raises(ValueError, match="no batches"):
        next(RepeatingLoader([]))


def test_an_iterable_dataset_is_taken_as_it_is() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    assert [b.tolist() for b in make_dataloader(Stream(), 2, 1, 2)] == [[0, 1], [2, 3], [4]]
