"""Tiles of a block layout: which blocks of queries and of keys are multiplied together, and which lie side by side.

A **tile** is what the rows of one head that read the same blocks have in common: m blocks of queries, n blocks of keys.
Tiles of the same m and n make a **chunk**, whose products are one batch: as many as a core's cache holds the scores of.
Where the blocks of a chunk lie at even distances, as in a window or in rows one after the other, they need no copy.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from refimpl.kernels.block_lists import BlockLists

CHUNK = 2**17  # scores alive at a time and thread: 0.5 MB in fp32; backward has two such, and blocks: a core's cache
TALL = 256  # tokens of queries in a tile, at most: more of them re-use the gathered keys, and fill the cache


@dataclass(frozen=True)
class Tiles:
    """G tiles of the same size: of each its head in the layout, its rows and its columns."""

    head: Tensor  # [G] of the layout
    rows: Tensor  # [G, m]
    cols: Tensor  # [G, n]


@dataclass(frozen=True)
class Blocks:
    """What some tiles take of a matrix, n blocks each; `even` if tile i has those from first + i step on, step >= 0."""

    tiles: int
    each: int  # n
    numbers: Tensor  # [tiles n], counted over batch, heads and rows
    even: tuple[int, int] | None  # first, step

    @staticmethod
    def of(numbers: Tensor, device: torch.device) -> "Blocks":
        """[g, n]."""
        (g, n), first = numbers.shape, int(numbers[0, 0])
        step = int(numbers[1, 0]) - first if g > 1 else n
        even = step >= 0 and torch.equal(numbers, first + step * torch.arange(g)[:, None] + torch.arange(n))
        return Blocks(g, n, numbers.flatten().to(device), (first, step) if even else None)


@dataclass(frozen=True)
class Chunk:
    """Some tiles on their way: which blocks of which heads."""

    q_rows: Blocks  # m of queries a tile
    k_cols: Blocks  # n of keys
    places: tuple[Tensor, ...]  # sequence [g], head [g], row [g, m], column [g, n]
    diagonal: tuple[Tensor, ...]  # (tile, i, j) where the i-th row and the j-th column are one block


def cuts(firsts: list[int], most: int) -> Iterator[slice]:
    """Chunks of tiles that begin at these rows: of `most`, or of half of that on where the even distance ends."""
    start = 0
    for end in range(1, len(firsts) + 1):
        ends = end < len(firsts) and firsts[end] - firsts[end - 1] != firsts[start + 1] - firsts[start]
        if end in (len(firsts), start + most) or (ends and 2 * (end - start) >= most):
            yield slice(start, end)
            start = end


class Plan:
    """A layout, made ready: which tiles there are. To be made once a layout, kept, and used on any batch.

    layout: [n_q, n_k], [1 or H, n_q, n_k] or [B, H, n_q, n_k] of blocks, true or nonzero where a block is read.
    causal: a token sees none after it. first: the number of the first row's block, where the queries are the last of
    the sequence. ValueError for another shape.
    """

    def __init__(self, layout: Tensor, causal: bool = False, first: int = 0) -> None:
        if layout.dim() not in (2, 3, 4):
            raise ValueError(f"a layout of shape {tuple(layout.shape)}: give [rows, columns], with or without heads")
        read = layout.detach().to("cpu").bool()
        if causal:
            read = read.tril(first)
        self.causal, self.first, self.shape = causal, first, tuple(read.shape[-2:])
        self.by_sequence = read.shape[0] if read.dim() == 4 else None
        read = read.reshape(-1, *self.shape)
        self.heads, self.blocks = len(read), int(read.sum())
        everywhere = read.numel() if not causal else len(read) * int(torch.ones(self.shape).tril(first).sum())
        self.density = self.blocks / max(1, everywhere)
        self.full, self.covered = self.blocks == everywhere, bool(read.any(-1).all())  # covered: each row reads some
        self.read = read
        self.lists: dict[torch.device, BlockLists] = {}  # the same for the kernel
        self.kept: dict[tuple[Any, ...], list[Chunk]] = {}  # of those calls that came

    def for_kernel(self, device: torch.device) -> BlockLists:
        """What the Triton kernel walks along."""
        if device not in self.lists:
            self.lists[device] = BlockLists.of(self.read.to(device), self.causal)
        return self.lists[device]

    def tiles(self, most: int) -> list[Tiles]:
        """All tiles, of `most` rows and less, those of a size together."""
        alike: dict[tuple[int, bytes], list[int]] = defaultdict(list)
        for head, part in enumerate(self.read.numpy()):
            for row, line in enumerate(part):
                alike[head, line.tobytes()].append(row)
        sizes: dict[tuple[int, int], list[tuple[int, list[int], Tensor]]] = defaultdict(list)
        for (head, _), rows in alike.items():
            cols = self.read[head, rows[0]].nonzero().flatten()
            for some in (rows[i : i + most] for i in range(0, len(rows), most)):
                if len(cols):
                    sizes[len(some), len(cols)].append((head, some, cols))
        return [
            Tiles(torch.tensor([t[0] for t in s]), torch.tensor([t[1] for t in s]), torch.stack([t[2] for t in s]))
            for s in sizes.values()
        ]

    def chunks(self, block: int, batch: int, heads: int, shared: int, device: torch.device) -> list[Chunk]:
        """The tiles of all sequences and heads, a few at a time; kept. shared: heads of queries to one of keys."""
        key = (block, batch, heads, shared, device, torch.get_num_threads())
        if key not in self.kept:
            self.kept[key] = list(self.make_chunks(*key))
        return self.kept[key]

    def make_chunks(
        self, block: int, batch: int, heads: int, shared: int, device: torch.device, threads: int
    ) -> Iterator[Chunk]:
        n_rows, n_cols = self.shape
        copies = torch.arange(batch * heads // self.heads)[:, None] * self.heads
        for tiles in self.tiles(max(1, TALL // block)):
            m, n = tiles.rows.shape[1], tiles.cols.shape[1]
            numbers = (copies + tiles.head).flatten()  # of heads, over the batch
            which = torch.arange(len(tiles.head)).repeat(len(copies))
            step = max(1, CHUNK * threads // (m * n * block**2))
            for here in cuts((numbers * n_rows + tiles.rows[which, 0]).tolist(), step):
                head, some = numbers[here], which[here]
                rows, cols = tiles.rows[some], tiles.cols[some]
                q_rows = Blocks.of(head[:, None] * n_rows + rows, device)
                k_cols = Blocks.of(head[:, None] // shared * n_cols + cols, device)
                on: tuple[Tensor, ...] = ()
                if self.causal:
                    on = (rows[:, :, None] + self.first == cols[:, None, :]).nonzero(as_tuple=True)
                places = (head // heads, head % heads, rows, cols)
                there = (tuple(x.to(device) for x in numbers) for numbers in (places, on))
                yield Chunk(q_rows, k_cols, *there)
