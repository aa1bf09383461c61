"""What may not be cut: the outputs of column layers that one piece of a row layer's input needs, found by derivatives.

A row layer's input is cut into U equal pieces, and each output of the layers before it asked which pieces it has a part
in: those at which its derivative is not 0. In a gated MLP each feature has a part in one feature, so every feature is a
unit; in attention the features of a head of q, k and v in those of that head, and with grouped queries a head of k in
those of a whole group: then the group is the unit. U is the largest number with which no output has a part in two.

U pieces need no U backward passes: piece u has the bits of u. One pass with the pieces whose bit b is 1, one with the
others, for each b; an output to which both come is of two pieces, else the bits tell which. 2 log2(U) passes.

With fewer units than ranks, 2 heads of keys for 4 ranks, each unit of k and v goes to ranks / U consecutive ranks, if q
alone falls into a multiple of them (`dealt`): the heads of queries that a rank has are then of one group, whose keys
and values it has whole, as some others have. q, k and v may lie in one matrix, of which one part is dealt out and one
copied: each output is asked for itself, and runs of outputs that fall into as many pieces are a block. Megatron-LM:
megatron/core/transformer/attention.py, `num_query_groups_per_partition`. vLLM: vllm/model_executor/layers/linear.py,
`num_kv_head_replicas`.

Where in a layer's outputs a unit's lie tells how they are packed: 0 0 1 1 is one block, 0 0 1 1 0 0 1 1 two, such as q
and k in one matrix. No operation of the model need be known for any of this.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from refimpl.parallel.auto.trace import Trace

UNSEEN, SEVERAL = -1, -2  # an output that has a part in no piece, or in more than one


class Dealt(NamedTuple):
    """One column layer's part in it: (length, units) of each block, and ranks that have a block of few units alike."""

    blocks: tuple[tuple[int, int], ...]
    copies: int = 1


@dataclass(frozen=True)
class Units:
    """What a region's layers have in common: `number` units; each column layer's blocks, and units of their own."""

    number: int
    width: int  # of the rows' inputs
    blocks: dict[str, tuple[int, ...]]
    alone: dict[str, tuple[tuple[int, int], ...]]  # of q alone there may be more units than of q and k together
    heads: dict[str, set[int]]  # into how many pieces some outputs of a layer fall, however they lie

    @property
    def most(self) -> int:
        """Heads of queries: units of the blocks that have more of them than all have together.

        There are none unless what they share is narrower than the rows' inputs, as heads of keys are.
        """
        found = [block for blocks in self.alone.values() for block in blocks]
        more = {units for _, units in found} - {self.number}
        wide = any(units == self.number and length >= self.width for length, units in found)
        return self.number if wide or len(more) != 1 or self.alone.keys() != self.blocks.keys() else more.pop()

    def dealt(self, ranks: int) -> tuple[int, dict[str, Dealt]] | None:
        """(units of the rows, each column layer's) for so many ranks; None if each rank cannot have one.

        With fewer than ranks what has few is copied. One that all share lets a rank have any number of `most`.
        """
        if self.number >= ranks:
            return self.number, {
                name: Dealt(tuple((length, self.number) for length in blocks)) for name, blocks in self.blocks.items()
            }
        even = self.number == 1 or (self.most % ranks == self.most % self.number == 0)
        if ranks % self.number or self.most < ranks or not even:
            return None
        return self.most, {name: Dealt(blocks, ranks // self.number) for name, blocks in self.alone.items()}


def find_units(found: Trace, rows: Sequence[str], columns: Sequence[str]) -> Units | None:
    """The most units into which all the rows' inputs and all the columns' outputs fall; None if none are seen."""
    width = math.gcd(*(x.shape[-1] for name in rows for x in found.entries[name]))
    most: dict[str, list[tuple[int, int]]] = {}  # each output's piece, of the most of which it is in one alone
    for number in reversed(divisors(width)):
        codes = pieces_of(found, rows, columns, number)
        for name, code in codes.items():
            known = most.setdefault(name, [(0, SEVERAL)] * len(code))
            most[name] = [
                (number, new) if old == SEVERAL else (n, old) for (n, old), new in zip(known, code, strict=True)
            ]
        if not any(SEVERAL in code for code in codes.values()):
            break
    silent = any(2 * code.count(UNSEEN) > len(code) for code in codes.values())  # as with a single token
    blocks = {name: packing(code, number) for name, code in codes.items()}
    if silent or any(packed is None for packed in blocks.values()):
        return None
    alone = {name: runs for name, outputs in most.items() if (runs := packed_runs(outputs))}
    heads = {name: {n for n, _ in outputs if n < width} for name, outputs in most.items()}
    return Units(number, width, {name: packed for name, packed in blocks.items() if packed is not None}, alone, heads)


def packed_runs(outputs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...] | None:
    """(length, units) of each block of a column layer, of whose outputs (units, piece) is known; None if not so."""
    blocks, like = list[tuple[int, int]](), 0
    filled = [(like := like if piece == UNSEEN and like else units, piece) for units, piece in outputs]
    for units, run in groupby(filled, key=lambda output: output[0]):
        packed = packing([piece for _, piece in run], units)
        if packed is None:
            return None
        blocks += [(length, units) for length in packed]
    return tuple(blocks)


def pieces_of(found: Trace, rows: Sequence[str], columns: Sequence[str], number: int) -> dict[str, list[int]]:
    """Column layer -> of each output which of `number` pieces it has a part in, or UNSEEN, or SEVERAL. [M]"""
    exits = [(name, y) for name in columns for y in found.exits[name]]
    codes = {name: torch.zeros(found.exits[name][0].shape[-1], dtype=torch.int64) for name in columns}
    seen = {name: torch.zeros_like(code, dtype=torch.bool) for name, code in codes.items()}
    mixed = {name: torch.zeros_like(code, dtype=torch.bool) for name, code in codes.items()}
    for bit in range(max(1, (number - 1).bit_length())):
        with_bit, without = (touched(found, rows, exits, number, bit, value) for value in (1, 0))
        for name in columns:
            mixed[name] |= with_bit[name] & without[name]
            codes[name] += with_bit[name] << bit
            seen[name] |= with_bit[name] | without[name]
        if all(bool(those.all()) for those in mixed.values()):
            break
    return {
        name: code.masked_fill(~seen[name], UNSEEN).masked_fill(mixed[name], SEVERAL).tolist()
        for name, code in codes.items()
    }


def touched(
    found: Trace, rows: Sequence[str], exits: Sequence[tuple[str, Tensor]], number: int, bit: int, value: int
) -> dict[str, Tensor]:
    """Column layer -> [M] bool: outputs that have a part in the pieces whose `bit` is `value`."""
    entries = [x for name in rows for x in found.entries[name] if x.requires_grad]
    draw = torch.Generator().manual_seed(bit)
    cotangents = []
    for x in entries:
        piece = torch.arange(x.shape[-1]) // (x.shape[-1] // number)
        weight = torch.rand(x.shape, generator=draw, dtype=x.dtype) + 0.5
        cotangents.append(weight * ((piece >> bit) & 1 == value))
    grads = torch.autograd.grad(entries, [y for _, y in exits], cotangents, retain_graph=True, allow_unused=True)
    result = {name: torch.zeros(y.shape[-1], dtype=torch.bool) for name, y in exits}
    for (name, _), grad in zip(exits, grads, strict=True):
        if grad is not None:
            result[name] |= (grad != 0).flatten(0, -2).any(0)
    return result


def packing(codes: Sequence[int], number: int) -> tuple[int, ...] | None:
    """Blocks in each of which the units lie one after the other, in equal shares; None if it is not so. UNSEEN fits."""
    length = len(codes)
    for count in range(1, length // number + 1):
        block, rest = divmod(length, count)
        if rest == 0 and block % number == 0:
            share = block // number
            if all(code in (UNSEEN, place % block // share) for place, code in enumerate(codes)):
                return (block,) * count
    blocks, start = list[int](), 0
    while start < length:
        share = next((n for n in range(length - start) if codes[start + n] != 0), length - start)
        expected = [unit for unit in range(number) for _ in range(share)]
        if share == 0 or list(codes[start : start + share * number]) != expected:
            return None
        blocks.append(share * number)
        start += share * number
    return tuple(blocks)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
