"""The parts that every published pattern is a union of: windows, stretches, columns, rows, random blocks, strides.

A part is a [n, n] tensor of booleans over blocks: row r is a block of queries, column c a block of keys, True where the
block is read. Of n^2 blocks

    window(n, w)            reads w n          neighbours; Longformer (arXiv:2004.05150), Mistral
    stretches(n, [w])       reads w n          one's own stretch of w blocks; Sparse Transformers' fixed
    columns(n, cols)        reads g n          blocks that everybody reads; BigBird's and Longformer's global tokens
    rows(n, rows)           reads g n          blocks that read everybody
    drawn(n, r, rng)        reads r n          BigBird (arXiv:2007.14062, section 2)
    strided(n, s)           reads n^2 / s      every s-th block; Sparse Transformers (arXiv:1904.10509, 4.3)

so all but the last are linear in the sequence's length. `|` joins parts; `lower` keeps what is not in the future.
"""

import random
from collections.abc import Iterable, Sequence
from types import ModuleType

import torch
from torch import Tensor

Generator = random.Random | ModuleType  # the module itself is the generator that `random.seed` sets


def none(n: int) -> Tensor:
    """No block: -> bool [n, n]."""
    return torch.zeros(n, n, dtype=torch.bool)


def lower(part: Tensor) -> Tensor:
    """Without the blocks of keys that come after the block of queries."""
    return part.tril()


def window(n: int, width: int, ahead: bool = True) -> Tensor:
    """`width // 2` blocks before one's own, one's own, and as many after it (unless not `ahead`): bool [n, n]."""
    row, col = torch.arange(n)[:, None], torch.arange(n)
    return (col >= row - width // 2) & (col <= row + (width // 2 if ahead else 0))


def stretches(n: int, widths: Sequence[int]) -> Tensor:
    """Stretches of `widths` blocks, the last width again and again; each reads itself: bool [n, n]."""
    starts, width = [0], list(widths)
    while starts[-1] < n:
        starts.append(starts[-1] + width[min(len(starts), len(width)) - 1])
    mine = torch.bucketize(torch.arange(n), torch.tensor(starts), right=True)
    return mine[:, None] == mine


def columns(n: int, ranges: Iterable[tuple[int, int]], from_own: bool = False) -> Tensor:
    """Blocks [start, end) that all rows read; `from_own`: the rows from `start` on: bool [n, n]."""
    part = none(n)
    for start, end in ranges:
        part[start if from_own else 0 :, start:end] = True
    return part


def rows(n: int, ranges: Iterable[tuple[int, int]]) -> Tensor:
    """Blocks [start, end) that read all columns: bool [n, n]."""
    return columns(n, ranges).T.clone()


def drawn(n: int, each: int, rng: Generator, past_only: bool = False) -> Tensor:
    """`each` different columns in every row, drawn by `rng.sample`; `past_only`: among 0 .. row: bool [n, n]."""
    part = none(n)
    for row in range(n):
        upto = row + 1 if past_only else n
        part[row, rng.sample(range(upto), min(each, upto))] = True
    return part


def strided(n: int, stride: int) -> Tensor:
    """The columns at a distance that `stride` divides, before and after: bool [n, n]."""
    row, col = torch.arange(n)[:, None], torch.arange(n)
    return (row - col) % stride == 0
