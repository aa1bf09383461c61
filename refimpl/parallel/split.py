"""Which part of a dimension each rank has: whole units, such as attention heads, dealt out as evenly as they go.

    Split((6,), units=3, ranks=2)       [a a b b | c c]                  3 heads of 2 features: rank 0 has two of them
    Split((4, 4), units=2, ranks=2)     [a a | b b] [c c | d d]          two blocks, each cut by itself: a fused q, k
                                         rank 0: a a c c   rank 1: b b d d
    Split((4,), units=2, ranks=4, copies=2)   [a a | b b]                2 heads of keys: ranks 0 and 1 have the first

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

    `copies`: ranks that have the same units.
    """

    blocks: tuple[int, ...]
    units: int
    ranks: int
    of: str = "dimension"
    copies: int = 1

    def __post_init__(self) -> None:
        """ValueError for blocks that are no whole units, and for fewer units than ranks."""
        if self.ranks % self.copies:
            raise ValueError(f"{self.of}: {self.ranks} ranks are no multiple of {self.copies} copies")
        for block in self.blocks:
            if block % self.units:
                raise ValueError(f"{self.of}: {block} features are not {self.units} equal units")
        if self.units < self.ranks // self.copies:
            raise ValueError(
                f"{self.of}: {self.units} units of {self.blocks[0] // self.units} cannot be dealt to {self.ranks} "
                f"ranks, each of which needs one: use at most {self.units} ranks"
            )

    def units_of(self, rank: int) -> range:
        """The units that this rank has."""
        place = rank // self.copies
        each, more = divmod(self.units, self.ranks // self.copies)
        first = place * each + min(place, more)
        return range(first, first + each + (place < more))

    def spans(self, rank: int) -> list[slice]:
        """Where this rank's parts lie in the whole, a slice a block."""
        mine, spans, start = self.units_of(rank), list[slice](), 0
        for block in self.blocks:
            unit = block // self.units
            spans.append(slice(start + mine.start * unit, start + mine.stop * unit))
            start += block
        return spans

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
        for rank, part in list(enumerate(parts))[:: self.copies]:
            lengths = [span.stop - span.start for span in self.spans(rank)]
            for block, piece in zip(blocks, part.split(lengths, dim), strict=True):  # type: ignore[no-untyped-call]
                block.append(piece)
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
