"""What may not be cut: the outputs of column layers that one piece of a row layer's input needs, found by derivatives.

A row layer's input is cut into U equal pieces, and each output of the layers before it asked which pieces it has a part
in: those at which its derivative is not 0. In a gated MLP each feature has a part in one feature, so every feature is a
unit; in attention the features of a head of q, k and v in those of that head, and with grouped queries a head of k in
those of a whole group: then the group is the unit. U is the largest number with which no output has a part in two.

U pieces need no U backward passes: piece u has the bits of u. One pass with the pieces whose bit b is 1, one with the
others, for each b; an output to which both come is of two pieces, else the bits tell which. 2 log2(U) passes.

With fewer units than ranks, 2 heads of keys for 4 ranks, each unit of k and v goes to ranks / U consecutive ranks, if q
alone falls into a multiple of them (`dealt`): the heads of queries that a rank has are then of one group, whose keys
and values it has whole, as some others have. Megatron-LM: megatron/core/transformer/attention.py,
`num_query_groups_per_partition`. vLLM: vllm/model_executor/layers/linear.py, `num_kv_head_replicas`.

Where in a layer's outputs a unit's lie tells how they are packed: 0 0 1 1 is one block, 0 0 1 1 0 0 1 1 two, such as q
and k in one matrix. No operation of the model need be known for any of this.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from refimpl.parallel.auto.trace import Trace


class Dealt(NamedTuple):
    """One column layer's part in it: its outputs are `blocks` of `units` each, which `copies` ranks have alike."""

    units: int
    blocks: tuple[int, ...]
    copies: int = 1


@dataclass(frozen=True)
class Units:
    """What a region's layers have in common: `number` units; each column layer's blocks, and units of its own."""

    number: int
    blocks: dict[str, tuple[int, ...]]
    alone: dict[str, Dealt]  # of q alone there may be more than of q and k together

    def dealt(self, ranks: int) -> tuple[int, dict[str, Dealt]] | None:
        """(units of the rows, each column layer's) for so many ranks; None if each rank cannot have one."""
        if self.number >= ranks:
            return self.number, {name: Dealt(self.number, blocks) for name, blocks in self.blocks.items()}
        more = {name: own for name, own in self.alone.items() if own.units > self.number}
        numbers = {own.units for own in more.values()}
        if ranks % self.number or len(numbers) != 1 or any(n % ranks or n % self.number for n in numbers):
            return None
        same = ranks // self.number
        few = {name: Dealt(self.number, blocks, same) for name, blocks in self.blocks.items() if name not in more}
        return numbers.pop(), more | few


def find_units(found: Trace, rows: Sequence[str], columns: Sequence[str]) -> Units | None:
    """The most units into which all the rows' inputs and all the columns' outputs fall; None if none are seen."""
    widths = [x.shape[-1] for name in rows for x in found.entries[name]]
    alone: dict[str, tuple[int, Tensor]] = {}
    for number in reversed(divisors(math.gcd(*widths))):
        codes = pieces_of(found, rows, columns, number)
        known = {name: code for name, code in codes.items() if code is not None}
        alone = {name: (number, code) for name, code in known.items()} | alone
        if len(known) == len(columns):
            break
    silent = any((code < 0).float().mean() > 0.5 for code in known.values())  # as with a single token
    blocks = {name: packing(code.tolist(), number) for name, code in known.items()}
    if silent or any(packed is None for packed in blocks.values()):
        return None
    own = {name: Dealt(n, packed) for name, (n, code) in alone.items() if (packed := packing(code.tolist(), n))}
    return Units(number, {name: packed for name, packed in blocks.items() if packed is not None}, own)


def pieces_of(found: Trace, rows: Sequence[str], columns: Sequence[str], number: int) -> dict[str, Tensor | None]:
    """Column layer -> [M] which of `number` pieces each output has a part in, -1 for none; None if one has two."""
    exits = [(name, y) for name in columns for y in found.exits[name]]
    codes = {name: torch.zeros(found.exits[name][0].shape[-1], dtype=torch.int64) for name in columns}
    seen = {name: torch.zeros_like(code, dtype=torch.bool) for name, code in codes.items()}
    mixed: set[str] = set()
    for bit in range(max(1, (number - 1).bit_length())):
        with_bit, without = (touched(found, rows, exits, number, bit, value) for value in (1, 0))
        for name in columns:
            if bool((with_bit[name] & without[name]).any()):
                mixed.add(name)
            codes[name] += with_bit[name] << bit
            seen[name] |= with_bit[name] | without[name]
        if len(mixed) == len(columns):
            break
    return {name: None if name in mixed else codes[name].masked_fill(~seen[name], -1) for name in columns}


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
    """Blocks in each of which the units lie one after the other, in equal shares; None if it is not so. -1: unknown."""
    length = len(codes)
    for count in range(1, length // number + 1):
        block, rest = divmod(length, count)
        if rest == 0 and block % number == 0:
            share = block // number
            if all(code in (-1, place % block // share) for place, code in enumerate(codes)):
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
