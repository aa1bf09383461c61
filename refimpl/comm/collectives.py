"""How the collectives are made: a reduction is an exchange followed by ordered adds, an all-gather N broadcasts.

gloo's own reduce-scatter is an all-reduce plus a slice (twice the bytes) and its all-gather fills a fresh buffer. Cut
the other way, a reduce-scatter is: hand chunk i of my buffer to rank i (`exchange`, n(N-1)/N bytes), then add the N
chunks I received. The adds run in rank order, ((g0 + g1) + g2) + ..., which is the order in which one process
accumulates N micro-batches: fp32 results are equal to that process's bit for bit. bf16 and fp16 travel as they are,
are summed in fp32 and rounded once.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from refimpl.comm.streams import Event, Stream, Streams

Empty = Callable[[int, torch.dtype, torch.device], Tensor]
Start = Callable[..., list[Any]]  # starts one of torch.distributed's collectives: see `Library.start`
Op = Literal["sum", "mean", "max"]
BLOCK = 1 << 18  # elements a CPU adds at a time: N + 1 blocks of 1 MB stay in a core's cache, so memory is read once
NATIVE = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


class Scratch:
    """Receive buffers kept between calls: a fresh 100 MB buffer costs 25,000 page faults before its first byte.

    What was queued with a buffer before `give` is done before what is queued with it after `take`, on any stream.
    """

    def __init__(self, streams: Streams | None = None, empty: Empty | None = None) -> None:
        """`empty(numel, dtype, device)` makes a buffer; torch's by default."""
        self.streams = streams or Streams()
        self._empty = empty or (lambda numel, dtype, device: torch.empty(numel, dtype=dtype, device=device))
        self._free: list[Tensor] = []  # by size
        self._given: dict[int, Event] = {}  # id of a free buffer -> when its last user's stream is through with it
        self._home: dict[int, Stream | None] = {}  # id of a buffer -> the stream that allocated it
        self._taken: dict[int, tuple[Tensor, Tensor]] = {}  # id of the view -> (view, buffer); the view keeps its id

    def take(self, numel: int, like: Tensor) -> Tensor:
        """A [numel] tensor of like's dtype and device: the smallest free buffer that holds it, or a new one."""
        need = numel * like.element_size()
        places = range(bisect_left(self._free, need, key=Tensor.numel), len(self._free))
        place = next((i for i in places if self._free[i].device == like.device), None)
        if place is not None:
            buffer = self._free.pop(place)
            self.streams.wait(self._given.pop(id(buffer)))
        else:
            # Any free buffer is too small: replace one rather than keep both.
            for small in self._free[:1]:
                self._let_go(small)
            self._free = self._free[1:]
            buffer = self._empty(need, torch.uint8, like.device)
            self._home[id(buffer)] = self.streams.current()
        view = buffer[:need].view(like.dtype)
        self._taken[id(view)] = (view, buffer)
        return view

    def lends(self, tensor: Tensor) -> bool:
        """Whether `tensor` came from `take` and has not been handed back."""
        return id(tensor) in self._taken

    def give(self, view: Tensor, keep: bool = True) -> None:
        """Hand a tensor from `take` back; without `keep` its memory is left to whoever still holds it."""
        _, buffer = self._taken.pop(id(view))
        if keep:
            insort(self._free, buffer, key=Tensor.numel)
            self._given[id(buffer)] = self.streams.record()
        else:
            self.streams.followed_by(self._home.pop(id(buffer)))

    def trim(self) -> None:
        """Keep no buffer that is free."""
        for buffer in self._free:
            self._let_go(buffer)
        self._free = []

    def _let_go(self, buffer: Tensor) -> None:
        """The stream that allocated a free buffer gets its memory: for what comes behind the last user."""
        with self.streams.use(self._home.pop(id(buffer))):
            self.streams.wait(self._given.pop(id(buffer)))

    def tensors(self) -> list[Tensor]:
        return [*self._free, *(buffer for _, buffer in self._taken.values())]


def chunk_sizes(numel: int, size: int) -> list[int]:
    """`numel` elements dealt to `size` ranks in contiguous chunks; the first numel % size are one longer."""
    return [numel // size + (r < numel % size) for r in range(size)]


def sent_in_all_reduce(numel: int, rank: int, size: int) -> int:
    """Elements that a rank sends in an all-reduce: all but its own chunk, then that to all others."""
    mine = numel // size + (rank < numel % size)
    return numel - mine + mine * (size - 1)


def joined(chunks: Sequence[Tensor]) -> Tensor | None:
    """The tensor [N*s] that chunks [s] lie in one after the other, if they do."""
    first, step = chunks[0], chunks[0].numel() * chunks[0].element_size()
    storage = first.untyped_storage().data_ptr()
    same = all(c.untyped_storage().data_ptr() == storage for c in chunks)
    if not same or any(c.data_ptr() != first.data_ptr() + i * step for i, c in enumerate(chunks)):
        return None
    return first.as_strided((len(chunks) * first.numel(),), (1,))


def exchange(start: Start, received: Tensor, x: Tensor, sizes: list[int], rank: int) -> list[Any]:
    """Start sending chunk i of x to rank i; received [(N-1) * sizes[rank]] collects the others' chunks for this rank.

    Two all-to-alls, to the ranks below and to those above, so that the own chunk is not copied on the way.
    """
    mine, below, above = sizes[rank], sizes[:rank], sizes[rank + 1 :]
    none_below, none_above = [0] * (rank + 1), [0] * (len(sizes) - rank)
    at, split = sum(below), mine * rank
    return [
        *start(dist.all_to_all_single, received[split:], x[:at], none_below + [mine] * len(above), below + none_above),
        *start(
            dist.all_to_all_single,
            received[:split],
            x[at + mine :],
            [mine] * len(below) + none_above,
            none_below + above,
        ),
    ]


def rows_of(received: Tensor, own: Tensor, rank: int, size: int) -> list[Tensor]:
    """received [(N-1) * s] from the other ranks, own [s] -> N rows [s] in rank order."""
    rows = received.view(size - 1, own.numel()).unbind()
    return [*rows[:rank], own, *rows[rank:]]


def ordered_reduce(out: Tensor, rows: list[Tensor], rank: int, op: Op) -> None:
    """rows, N tensors [s] -> out [s], added in rank order; a mean divides once.

    `out` may be rows[rank]. Low precision is summed in fp32 and rounded to the rows' dtype once, whatever dtype `out`
    has.
    """
    own = rows[rank]
    combine = torch.maximum if op == "max" else torch.add
    low = own.dtype in (torch.bfloat16, torch.float16)
    # Sum in `out` itself, unless that would overwrite the own row before its turn or needs another dtype.
    in_place = len(rows) > 1 and rank < 2 and not low and out.dtype == own.dtype
    block = BLOCK >> low if own.device.type == "cpu" else max(1, own.numel())  # on a GPU each block is a launch a row
    wide = torch.empty(
        0 if in_place else min(block, own.numel()), dtype=torch.float32 if low else own.dtype, device=own.device
    )
    for start in range(0, own.numel(), block):
        blocks, here = rows, out
        if own.numel() > block:
            blocks, here = [row[start : start + block] for row in rows], out[start : start + block]
        if in_place:
            total, rest = combine(blocks[0], blocks[1], out=here), blocks[2:]
        else:
            total, rest = wide[: here.numel()].copy_(blocks[0]), blocks[1:]
        for other in rest:
            combine(total, other, out=total)
        if op == "mean" and len(rows) > 1:
            total.div_(len(rows))
        if not in_place:
            here.copy_(total if here.dtype == own.dtype else total.to(own.dtype))


def combine(total: Tensor, other: Tensor, op: Op) -> Tensor:
    """`other` [n] joins `total` [n], in place: the larger of both for "max", else their sum."""
    return torch.maximum(total, other, out=total) if op == "max" else total.add_(other)


def divide(total: Tensor, ranks: int, op: Op) -> Tensor:
    """The sum of `ranks` ranks becomes their mean, in place, if that is asked for."""
    return total.div_(ranks) if op == "mean" and ranks > 1 else total


def all_gather(start: Start, chunks: list[Tensor], x: Tensor, rank: int) -> list[Any]:
    """Start N broadcasts, one from each rank, straight into the N places of the result."""
    if chunks[rank].data_ptr() != x.data_ptr():
        chunks[rank].copy_(x)
    if len(chunks) == 1:
        return []
    return [
        handle
        for source, chunk in enumerate(chunks)
        if chunk.numel()
        for handle in start(dist.broadcast, chunk, group_src=source)
    ]
