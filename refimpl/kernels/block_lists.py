"""A block layout as lists: for each block of queries the blocks of keys that it reads, and for each of keys the others.

A kernel that walks a list never meets an absent block: work is proportional to the blocks present. A list takes 4 bytes
a block present and 8 a row: with 5% of 256 x 256 blocks present two of them are 30 KB a head, the booleans 65 KB.
Lists are made once a layout (that waits for the device) and kept with the pattern.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lists:
    """All rows of all heads, one list after the other: int32."""

    starts: Tensor  # [heads x rows + 1] where each row's list begins in `blocks`
    blocks: Tensor  # [present] ascending in each row
    order: Tensor  # [heads x rows] rows of a head in the order to do them: the longest first

    def to(self, device: torch.device) -> "Lists":
        return Lists(self.starts.to(device), self.blocks.to(device), self.order.to(device))


@dataclass(frozen=True)
class BlockLists:
    """`BlockLists.of(layout, causal)`; shape is [heads, rows, columns]."""

    by_queries: Lists
    by_keys: Lists
    shape: tuple[int, int, int]
    present: int  # blocks, in all heads
    causal: bool

    @classmethod
    def of(cls, layout: Tensor, causal: bool = False) -> "BlockLists":
        """layout [heads, rows, columns] or [rows, columns], true or nonzero where a block of keys is read.

        causal: blocks beyond the diagonal are left out; rows and columns end together.
        """
        if layout.ndim not in (2, 3):
            raise ValueError(f"a layout is [heads, rows, columns] or [rows, columns], not {list(layout.shape)}")
        there = layout.bool().reshape(-1, *layout.shape[-2:])
        heads, rows, columns = there.shape
        if causal:
            there = there.tril(columns - rows)
        by_queries, by_keys = lists(there), lists(there.transpose(1, 2))
        return cls(by_queries, by_keys, (heads, rows, columns), len(by_queries.blocks), causal)

    def to(self, device: torch.device) -> "BlockLists":
        """The same lists there; on "meta" their shapes alone."""
        return BlockLists(self.by_queries.to(device), self.by_keys.to(device), self.shape, self.present, self.causal)


def lists(there: Tensor) -> Lists:
    """there [heads, rows, columns] bool."""
    counts = there.sum(2)
    starts = torch.zeros(counts.numel() + 1, dtype=torch.int32, device=there.device)
    starts[1:] = counts.flatten().cumsum(0)
    order = counts.argsort(dim=1, descending=True, stable=True)
    return Lists(starts, there.nonzero()[:, 2].int(), order.flatten().int())
