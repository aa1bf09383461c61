"""Bytes to everyone: right at every length, in one all-gather where all are short."""

from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from worlds import run

from refimpl.comm.agree import Agreed
from refimpl.comm.group import Group
from refimpl.comm.objects import SHORT, to_everyone


def said(lengths: list[list[int]]) -> list[tuple[list[bytes], int]]:
    """In a rank: what comes of messages of these lengths, a list for all ranks each, and of how many all-gathers."""
    handle, found = dist.group.WORLD, []
    assert handle is not None
    for each in lengths:
        with patch("torch.distributed.all_gather", wraps=dist.all_gather) as sent, torch.device("meta"):
            found.append((to_everyone(handle, message(handle.rank(), each[handle.rank()])), sent.call_count))
    return found


def message(rank: int, length: int) -> bytes:
    return bytes((rank + i) % 251 for i in range(length))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_length_arrives_whole(ranks: int) -> None:
    sizes = [0, 1, SHORT - 1, SHORT, SHORT + 1, 3 * SHORT + 7]
    lengths = [[sizes[(i + 2 * rank) % len(sizes)] for rank in range(ranks)] for i in range(len(sizes))]
    lengths += [[size] * ranks for size in sizes]
    for found in run(said, lengths, ranks=ranks):
        for each, (messages, sent) in zip(lengths, found, strict=True):
            assert messages == [message(rank, length) for rank, length in enumerate(each)]
            assert sent == (1 if max(each) <= SHORT else 2)


def late() -> list[int]:
    """In a rank: rank 1 comes when rank 0 has said that it waits, in the first call of a group."""
    group, store = Group(dist.new_group()), _get_default_store()
    group.patience.late = 0.01
    if group.rank == 1:
        store.wait(["said so"], timedelta(seconds=5))
    with patch.object(Agreed, "is_late", lambda *_: store.set("said so", "")):
        return group.all_gather_object(group.rank)


def test_who_waits_in_a_groups_first_call_says_so() -> None:
    """GLM loads a checkpoint under a lock that one rank has at a time, and else hung without a word."""
    assert run(late, ranks=2) == [[0, 1], [0, 1]]
