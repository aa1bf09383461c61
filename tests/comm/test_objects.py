"""Bytes to everyone: right at every length, in one all-gather where all are short."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from worlds import run

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
