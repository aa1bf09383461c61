"""Grades chapter 07's shared input: what stays of it, what travels, and that it comes back as it was."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from refimpl.grading.compare import equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, own_memory, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, same_traffic


@on_ranks(2, 3, 4)
def test_PartitionedInput(answer: Answer, group: WatchedGroup) -> None:
    for shape, dtype in (
        ((5, 3), torch.float32),
        ((8,), torch.float32),
        ((1,), torch.float32),
        ((7, 3), torch.bfloat16),
        ((67, 31), torch.float32),
        ((), torch.float32),
        ((0, 3), torch.float32),
        ((5,), torch.int64),
    ):
        case(f"{tuple(shape)} of {dtype}")
        size = -(-math.prod(shape) // group.size)
        kept, fresh = Kept(group), group.fresh()
        x = activation(shape, dtype)
        with untouched(x=x):
            held = answer.PartitionedInput(x, fresh)
        del x
        require(isinstance(getattr(held, "mine", None), Tensor), "self.mine, this rank's part of x, is missing")
        own_memory(held.mine, "mine", "copy it into memory of its own")
        require(held.mine.numel() == size, f"{held.mine.numel()} elements are kept, expected {size}: 1/N, rounded up")
        require(not held.mine.requires_grad, "mine holds the graph of x, and with it what comes before: detach x")
        kept.judge(size * dtype.itemsize, "PartitionedInput", "this rank's part alone may stay, nothing of x")
        require(not fresh.ledger.events, "something was sent when x was cut: every rank has all of it already")
        expected = activation(shape, dtype).detach()
        padded = F.pad(expected.flatten(), (0, size * group.size - expected.numel()))
        equal(held.mine, padded.view(group.size, size)[group.rank], "mine (a part of x with zeros behind its end)")
        del expected, padded
        oracle = group.oracle()
        for time in ("first", "second"):
            fresh.ledger.reset()
            again = held.whole()
            equal(again, activation(shape, dtype).detach(), f"the {time} whole()")
            require(not again.requires_grad, "whole() requires a gradient: x comes back as a plain tensor")
            del again
            oracle.ledger.reset()
            oracle.all_gather(torch.empty(size * group.size, dtype=dtype), torch.zeros(size, dtype=dtype))
            same_traffic(fresh, oracle, "whole()", itemsize=dtype.itemsize)
        kept.judge(size * dtype.itemsize, "after whole() PartitionedInput", "this rank's part alone may stay")


def activation(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a layer has computed: it has a graph, and where it has two dimensions it is not contiguous."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
    x = (drawn * 2**40 + 1).to(dtype).requires_grad_(dtype.is_floating_point)  # integers beyond a float's 24 bits
    return x.t().contiguous().t() if x.ndim == 2 else x * 1
