"""The position in the data: torch's order, and any number of ranks goes on behind what was taken."""

import itertools

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from refimpl.engine.dataloader import StatefulDistributedSampler, make_dataloader


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 10, 24])
def test_the_order_is_torchs(size: int, drop_last: bool, ranks: int) -> None:
    for rank, shuffle in itertools.product(range(ranks), (False, True)):
        how = {"num_replicas": ranks, "rank": rank, "shuffle": shuffle, "drop_last": drop_last, "seed": 3}
        ours, theirs = StatefulDistributedSampler(range(size), **how), DistributedSampler(range(size), **how)
        for epoch in (0, 5):
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert list(ours) == list(theirs)
            theirs.set_epoch(epoch + 1)
            assert list(ours) == list(theirs)  # comes by itself


def took(loaders: list, batches: int) -> list[int]:
    """What all ranks together see in a number of batches each."""
    iterators = [iter(loader) for loader in loaders]
    return [int(x) for _ in range(batches) for it in iterators for x in next(it)[0]]


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 2), (1, 4), (4, 1)])
def test_another_number_of_ranks_takes_the_rest_of_the_epoch(before: int, after: int) -> None:
    data = TensorDataset(torch.arange(48))
    loaders = [make_dataloader(data, 2, rank, before) for rank in range(before)]
    seen = took(loaders, 3)
    states = {str(loader.sampler.state_dict()) for loader in loaders}
    assert states == {str({"epoch": 0, "taken": 3 * 2 * before})}
    others = [make_dataloader(data, 1, rank, after) for rank in range(after)]
    for loader in others:
        loader.sampler.load_state_dict(loaders[0].sampler.state_dict())
        loader.sampler.set_epoch(0)  # what a loop over epochs says: the one that was under way goes on
    rest = [int(x) for loader in others for (batch,) in loader for x in batch]
    assert set(seen) | set(rest) == set(range(48))
    assert len(seen + rest) - 48 == -(48 - len(seen)) % after  # as torch pads a share
    assert sorted(int(x) for loader in others for (b,) in loader for x in b) == list(range(48))  # the next is whole


def test_behind_a_whole_epoch_comes_the_next() -> None:
    data = TensorDataset(torch.arange(10))
    one, other = make_dataloader(data, 3, 0, 1), make_dataloader(data, 3, 0, 1)
    took([one], 4)
    other.sampler.load_state_dict(one.sampler.state_dict())
    assert took([other], 4) == took([one], 4)


def test_an_epoch_whose_rest_is_dropped_is_whole_too() -> None:
    one, other = (StatefulDistributedSampler(range(11), num_replicas=3, rank=0, drop_last=True) for _ in range(2))
    assert len(list(one)) == 3
    other.load_state_dict(one.state_dict())
    assert list(other) == list(one)


def test_another_epoch_begins_at_its_beginning() -> None:
    sampler, fresh = (StatefulDistributedSampler(range(9), num_replicas=1, rank=0) for _ in range(2))
    sampler.load_state_dict({"epoch": 0, "taken": 4})
    for s in (sampler, fresh):
        s.set_epoch(2)
    assert list(sampler) == list(fresh)


def test_a_new_iterator_leaves_torchs_random_numbers_alone() -> None:
    loader = make_dataloader(TensorDataset(torch.arange(4)), 1, 0, 1)
    before = torch.get_rng_state()
    took([loader], 2)
    assert torch.equal(torch.get_rng_state(), before)
