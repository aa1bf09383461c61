"""What all patterns are: a number of heads, a size of blocks, and a layout made for a length.

A layout is int64 [num_heads, n, n] over n = seq_len / block blocks: 1 where a block of queries (row) reads a block of
keys (column). It costs 8 n^2 bytes a head: 0.5 MB at 4,096 tokens in blocks of 16, where a mask of tokens has 16 M
entries. A head reads `layout.sum()` blocks of block^2 scores; `density` is their share.

A subclass says what one head reads, as `part(n, head)`. DeepSpeed: deepspeed/ops/sparse_attention/sparsity_config.py
(its layouts, names, options and refusals are these; it was removed in 0.19.7).
"""

import random
from typing import Any

import torch
from torch import Tensor

from refimpl.model.patterns.parts import Generator

DIRECTIONS = ("unidirectional", "bidirectional")


class SparsityConfig:
    """A pattern. Subclasses define `part`, or `make_layout` as DeepSpeed's users do.

    num_heads: of the layer. block: tokens in a block's side. different_layout_per_head: patterns with variants or
    chance make one for each head, else head 0's is everybody's. seed: of patterns with chance; None draws from
    Python's `random`, as DeepSpeed's do, so that ranks agree only if it was seeded alike on all. attention: a causal
    model's is "unidirectional".

    ValueError for sizes below 1, NotImplementedError (DeepSpeed's) for another `attention`.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        seed: int | None = None,
        attention: str | None = None,
    ) -> None:
        self.num_heads = at_least("num_heads", num_heads, 1)
        self.block = at_least("block", block, 1)
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1
        self.seed = seed
        if attention is not None:  # of patterns that have a direction
            self.attention = attention
            if attention not in DIRECTIONS:
                raise NotImplementedError(f"attention is {attention!r}: choose from {', '.join(DIRECTIONS)}")

    @property
    def past(self) -> bool:
        """Whether no block after the block of queries is read."""
        return getattr(self, "attention", None) == "unidirectional"

    def part(self, n: int, head: int, rng: Generator) -> Tensor:
        """What `head` reads of n x n blocks: bool [n, n]."""
        raise NotImplementedError(f"{type(self).__name__} defines neither part nor make_layout")

    def setup_layout(self, seq_len: int) -> Tensor:
        """Nothing read yet: int64 zeros [num_heads, n, n]. ValueError if `block` does not divide `seq_len`."""
        if seq_len % self.block:
            raise ValueError(
                f"sequence length {seq_len} is not a multiple of the block size {self.block}: pad it to "
                f"{-(-seq_len // self.block) * self.block} (SparseAttentionUtils.pad_to_block_size does)"
            )
        n = seq_len // self.block
        return torch.zeros(self.num_heads, n, n, dtype=torch.int64)

    def make_layout(self, seq_len: int) -> Tensor:
        """The layout for `seq_len` tokens: int64 [num_heads, n, n]. ValueError if `block` does not divide it."""
        layout = self.setup_layout(seq_len)
        rng: Generator = random if self.seed is None else random.Random(self.seed)
        for head in range(self.num_layout_heads):
            layout[head] = self.part(layout.shape[1], head, rng)
        return self.check_and_propagate_first_head_layout(layout)

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Head 0's layout for all, unless each has its own. In place."""
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout


def density(layout: Tensor, causal: bool = False) -> float:
    """The share of blocks that are read; `causal`: of those that are not in the future. 0 of no block at all."""
    of = torch.ones_like(layout, dtype=torch.bool)
    if causal:
        of = of.tril()
    return float((layout.bool() & of).sum() / max(1, int(of.sum())))


def at_least(name: str, value: Any, least: int) -> int:
    """`value`, ValueError unless it is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}: it must be an integer of at least {least}")
    return value


def within(name: str, count: int, n: int) -> None:
    """ValueError if a row of n blocks has not `count`."""
    if count > n:
        raise ValueError(f"{name} is {count}, but a row has only {n} blocks: ask for fewer, or for smaller blocks")


def spans(starts: list[int], ends: list[int] | None) -> list[tuple[int, int]]:
    """[start, end) of each global range; single blocks without `ends`. ValueError if they do not match."""
    if ends is None:
        return [(start, start + 1) for start in starts]
    if len(starts) != len(ends):
        raise ValueError(
            f"{len(starts)} global_block_indices and {len(ends)} global_block_end_indices: give an end for each"
        )
    for start, end in zip(starts, ends, strict=True):
        if start >= end:
            raise ValueError(f"a global range starts at block {start} and ends at {end}: the end is exclusive")
    return list(zip(starts, ends, strict=True))
