"""An arena: one block of memory from which tensors are cut, and which closes its gaps while they are in use.

    free            [....]      a gap between pieces; next to each other they are one
    piece           [####]      a tensor that was cut out and is alive, by itself or by a view of it
    defragment      [##][#][##]..[#]..  ->  [##][#][##][#]....     pieces move to the front, in order

A piece has a storage of its own over its part of the block, so that Python says when its last tensor is gone: then it
is free, nobody calls `free`. Moving a piece copies its bytes and points its tensor there (`Tensor.set_`). A view has
its own pointer, which nobody can follow; so a piece of which another tensor is alive (a view, a detach, what autograd
saved) is pinned: it stays, and others move up to it. A live tensor never changes its values.

Memory: the block, from the beginning; no byte more, whatever comes and goes. Without an arena a checkpoint that
outlives the temporaries around it leaves holes in the allocator's segments. PyTorch's `expandable_segments:True`
(PYTORCH_ALLOC_CONF) maps free pages to where they are needed, and makes an arena unnecessary where it is supported.
Rajbhandari et al. 2020, arXiv:1910.02054, section 6.3 (MD). DeepSpeed: `contiguous_memory_optimization` in
deepspeed/runtime/activation_checkpointing/checkpointing.py, whose buffers have one size, and
deepspeed/runtime/zero/contiguous_memory_allocator.py, which moves parameters.
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage

ALIGN = 64  # bytes: where a piece may begin; enough for every dtype and for vector instructions


class ArenaFull(RuntimeError):
    """No gap is large enough, and moving pieces does not make one."""


@dataclass
class Piece:
    """[offset, offset + size) of the block, in bytes, padding included."""

    offset: int
    size: int
    tensor: "weakref.ref[Tensor]"

    @property
    def end(self) -> int:
        return self.offset + self.size


class Arena:
    """`size` bytes on `device`. Not shared between threads."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.block = torch.empty(round_up(size), dtype=torch.uint8, device=device)
        self.pieces: list[Piece] = []  # by offset
        self.moved_bytes = 0  # by defragmentation, so far

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in the arena, its values what was there. Closes gaps if it must; ArenaFull if that is not enough."""
        nbytes = math.prod(shape) * dtype.itemsize
        size = max(ALIGN, round_up(nbytes))
        offset = self._gap(size)
        if offset is None and self.free_bytes >= size:
            self.defragment()
            offset = self._gap(size)
        if offset is None:
            raise ArenaFull(
                f"no room for {nbytes} bytes in an arena of {self.size}: {self.free_bytes} are free, the largest gap "
                f"has {self.largest_gap}, and {self.pinned} of {len(self.pieces)} tensors cannot move, because views "
                "of them are alive; make it larger, or let go of views"
            )
        storage = self._storage(offset, size)
        tensor = torch.empty(0, dtype=dtype, device=self.block.device)
        tensor.set_(storage, 0, tuple(shape))  # type: ignore[call-overload]
        piece = Piece(offset, size, weakref.ref(tensor))
        self._add(piece, storage)
        return tensor

    def defragment(self) -> None:
        """Move every piece that can move to the front, in order."""
        end = 0
        for piece in list(self.pieces):
            if piece.offset > end and (tensor := self._movable(piece)) is not None:
                self._move(piece, tensor, end)
            end = piece.end

    def _gap(self, size: int) -> int | None:
        """Where the first gap of `size` bytes is."""
        return next((offset for offset, room in self.gaps() if room >= size), None)

    def gaps(self) -> list[tuple[int, int]]:
        """(offset, bytes) of what is free, in order."""
        starts = [0, *(p.end for p in self.pieces)]
        ends = [*(p.offset for p in self.pieces), self.size]
        return [(start, end - start) for start, end in zip(starts, ends, strict=True) if end > start]

    @property
    def size(self) -> int:
        return self.block.numel()

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self.gaps())

    @property
    def largest_gap(self) -> int:
        return max((size for _, size in self.gaps()), default=0)

    @property
    def pinned(self) -> int:
        """Pieces that cannot move now."""
        return sum(self._movable(piece) is None for piece in self.pieces)

    def _storage(self, offset: int, size: int) -> UntypedStorage:
        return self.block.untyped_storage()[offset : offset + size]  # type: ignore[no-any-return]

    def _movable(self, piece: Piece) -> Tensor | None:
        """The piece's tensor, if it is the only one over its storage."""
        tensor = piece.tensor()
        if tensor is None:
            return None
        storage = tensor.untyped_storage()
        return tensor if torch._C._storage_Use_Count(storage._cdata) <= 2 else None  # the tensor's, and `storage`

    def _move(self, piece: Piece, tensor: Tensor, offset: int) -> None:
        """Forward in the block: the parts may overlap, so the bytes go in steps of the distance."""
        step = piece.offset - offset
        for start in range(0, piece.size, step):
            stop = min(start + step, piece.size)
            self.block[offset + start : offset + stop] = self.block[piece.offset + start : piece.offset + stop]
        self.moved_bytes += piece.size
        storage = self._storage(offset, piece.size)
        self.pieces.remove(piece)
        with torch.no_grad():
            tensor.set_(storage, 0, tensor.shape, tensor.stride())
        piece.offset = offset
        self._add(piece, storage)

    def _add(self, piece: Piece, storage: UntypedStorage) -> None:
        self.pieces.append(piece)
        self.pieces.sort(key=lambda p: p.offset)
        weakref.finalize(storage, _release, weakref.ref(self), piece).atexit = False


def _release(arena: "weakref.ref[Arena]", piece: Piece) -> None:
    """A storage of `piece` is gone. If that was the one that it leaves, `_move` has taken it out, and adds it again."""
    here = arena()
    if here is not None and piece in here.pieces:
        here.pieces.remove(piece)


def round_up(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@dataclass
class Contiguous:
    """A home (see `home.py`): inputs are copied into an arena for `number` of them.

    There is one for each place among the arguments, shape and dtype, made when the first such input comes.
    """

    number: int
    device: torch.device | None = None  # of the arenas; that of the tensors by default
    arenas: dict[tuple[int, torch.Size, torch.dtype], Arena] = field(default_factory=dict, init=False)

    def put(self, x: Tensor, place: int = 0) -> tuple[Tensor, torch.device]:
        """ArenaFull when more than `number` inputs of one shape and dtype wait for backward."""
        kind = (place, x.shape, x.dtype)
        if kind not in self.arenas:
            room = self.number * max(ALIGN, round_up(x.numel() * x.element_size()))
            self.arenas[kind] = Arena(room, self.device or x.device)
        try:
            return self.arenas[kind].empty(x.shape, x.dtype).copy_(x), x.device
        except ArenaFull as full:
            raise ArenaFull(
                f"number_checkpoints is {self.number}, and more inputs {tuple(x.shape)} than that wait for backward: "
                "set it to the number of checkpoints in a forward, or call reset() when forwards without backward ran"
            ) from full

    def get(self, packed: tuple[Tensor, torch.device]) -> Tensor:
        tensor, device = packed
        return tensor.to(device)
