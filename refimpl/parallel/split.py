"""Which part of a dimension each rank has: whole units, such as attention heads, dealt out as evenly as they go.

    Split((6,), units=3, ranks=2)       [a a b b | c c]                  3 heads of 2 features: rank 0 has two of them
    Split((4, 4), units=2, ranks=2)     [a a | b b] [c c | d d]          two blocks, each cut by itself: a fused q, k
                                         rank 0: a a c c   rank 1: b b d d
    Split((4,), units=2, ranks=4, copies=2)   [a a | b b]                2 heads of keys: ranks 0 and 1 have the first
    Split((4, 1), (4, 1), ranks=2, copies=2)  [a b | c d] [e]            4 heads of queries and 1 of keys in one matrix
                                         rank 0: a b e   rank 1: c d e

A unit is never cut. A count that the ranks do not divide is dealt out unevenly, the first ranks having one unit more;
so a vocabulary of 257 on 2 ranks has 129 and 128 rows, and no padding that later has to be masked. (Megatron-LM pads it
to a multiple of 128 N for its kernels' sake.) Fewer units than ranks are refused, with the numbers, unless `copies`
consecutive ranks shall have the same. DeepSpeed: deepspeed/module_inject/tp_shard.py, `get_shard_size_list`.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from refimpl.comm.group import Group


@dataclass(frozen=True)
class Split:
    """`blocks`: lengths that are cut one by one, each in `units` equal pieces; `of`: what is cut, for the errors.

    `units`: of all blocks, or of each. `copies`: ranks that have the same units, of blocks with fewer units than ranks.
    """

    blocks: tuple[int, ...]
    units: int | tuple[int, ...]
    ranks: int
    of: str = "dimension"
    copies: int = 1

    def __post_init__(self) -> None:
        """ValueError for blocks that are no whole units, and for fewer units than ranks."""
        if self.ranks % self.copies:
            raise ValueError(f"{self.of}: {self.ranks} ranks are no multiple of {self.copies} copies")
        for block, units in zip(self.blocks, self.each, strict=True):
            if block % units:
                raise ValueError(f"{self.of}: {block} features are not {units} equal units")
            if units < self.ranks // self.copies_of(units):
                raise ValueError(
                    f"{self.of}: {units} units of {block // units} cannot be dealt to {self.ranks} "
                    f"ranks, each of which needs one: use at most {units} ranks"
                )

    @property
    def each(self) -> tuple[int, ...]:
        """Every block's units."""
        return self.units if isinstance(self.units, tuple) else (self.units,) * len(self.blocks)

    def copies_of(self, units: int) -> int:
        """Ranks that have the same units of a block of so many."""
        return self.copies if units < self.ranks else 1

    def units_of(self, rank: int, block: int = 0) -> range:
        """The units that this rank has of a block."""
        copies = self.copies_of(self.each[block])
        each, more = divmod(self.each[block], self.ranks // copies)
        place = rank // copies
        first = place * each + min(place, more)
        return range(first, first + each + (place < more))

    def spans(self, rank: int) -> list[slice]:
        """Where this rank's parts lie in the whole, a slice a block."""
        spans, start = list[slice](), 0
        for index, (block, units) in enumerate(zip(self.blocks, self.each, strict=True)):
            mine, unit = self.units_of(rank, index), block // units
            spans.append(slice(start + mine.start * unit, start + mine.stop * unit))
            start += block
        return spans

    def copied(self, rank: int) -> list[slice]:
        """Where in this rank's part lies what other ranks have too."""
        found, start = list[slice](), 0
        for span, units in zip(self.spans(rank), self.each, strict=True):
            end = start + span.stop - span.start
            if self.copies_of(units) > 1:
                begin = found.pop().start if found and found[-1].stop == start else start
                found.append(slice(begin, end))
            start = end
        return found

    @cached_property
    def sizes(self) -> list[int]:
        """Each rank's length, of all blocks together."""
        return [sum(span.stop - span.start for span in self.spans(rank)) for rank in range(self.ranks)]

    @property
    def whole(self) -> int:
        return sum(self.blocks)

    def part(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """x [.., whole, ..] -> [.., sizes[rank], ..], a copy. ValueError if x is of another size."""
        if x.shape[dim] != self.whole:
            raise ValueError(f"{self.of}: dimension {dim} of {tuple(x.shape)} has not the {self.whole} that are split")
        pieces = [x.narrow(dim, s.start, s.stop - s.start) for s in self.spans(rank)]
        return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].contiguous().clone()

    def join(self, parts: list[Tensor], dim: int) -> Tensor:
        """Every rank's part, in rank order -> the whole."""
        blocks: list[list[Tensor]] = [[] for _ in self.blocks]
        for rank, part in enumerate(parts):
            lengths = [span.stop - span.start for span in self.spans(rank)]
            pieces = part.split(lengths, dim)  # type: ignore[no-untyped-call]
            for block, units, piece in zip(blocks, self.each, pieces, strict=True):
                block += [piece] if rank % self.copies_of(units) == 0 else []
        return torch.cat([piece for block in blocks for piece in block], dim)

    def gather(self, part: Tensor, group: Group, dim: int, tag: str) -> Tensor:
        """This rank's part -> the whole, on every rank. Sends the largest part to each other rank: (N - 1) of them."""
        largest, mine = max(self.sizes), part.movedim(dim, 0)
        if mine.shape[0] < largest:
            mine = torch.cat([mine, mine.new_zeros(largest - mine.shape[0], *mine.shape[1:])])
        out = part.new_empty(self.ranks, *mine.shape)  # [N, largest, ..]
        group.all_gather(out, mine.contiguous(), tag=tag)
        parts = [out[rank, :size].movedim(0, dim) for rank, size in enumerate(self.sizes)]
        return self.join(parts, dim)
