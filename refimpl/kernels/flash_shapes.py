"""What the kernels of attention have to know about their inputs, and the errors for inputs that they cannot take."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from refimpl.kernels.checks import floating, number, one_device, whole
from refimpl.kernels.dots import dots
from refimpl.kernels.language import INTERPRETED, capability, shared_memory, triton
from refimpl.kernels.tiles import next_power_of_2

WIDEST = 256  # of a head: its tiles still fit on the chip
FARTHEST = 1 << 30  # places that a window reaches: more would be as much, but for sums of 32 bits


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut: queries and keys a tile, warps a program, loads in flight."""

    rows: int
    columns: int
    warps: int
    stages: int


def roomy(device: torch.device) -> bool:
    """Whether 16-bit tiles of heads wider than 128 may be an H100's, which take up to 133 KB.

    Cards of the RTX series, L4, L40 and A10 have 99 KB for a program (sm_86, 89, 120): smaller tiles there.
    """
    return shared_memory(device) >= 133 * 1024


@dataclass(frozen=True)
class Shapes:
    """Sizes of one call. `queries` and `keys`: of a sequence, or of the longest one where `starts` cut the tokens."""

    batch: int
    heads: int
    group: int  # heads of q that share a head of k and v
    width: int
    tokens: int  # queries of all sequences
    tokens_k: int
    queries: int
    keys: int
    left: int  # keys before the query's own place that it sees; -1: all
    right: int  # and after
    scale: float
    starts_q: Tensor | None = None
    starts_k: Tensor | None = None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, left: int, right: int, scale: float) -> "Shapes":
        """Of q [B, H, T, D] and k [B, H / G, S, D]."""
        batch, heads, queries, width = q.shape
        keys = k.shape[2]
        group = heads // k.shape[1]
        return cls(batch, heads, group, width, batch * queries, batch * keys, queries, keys, left, right, scale)

    @property
    def padded(self) -> int:
        return max(16, next_power_of_2(self.width))  # a matrix unit takes no less than 16

    @property
    def log2_scale(self) -> float:
        return self.scale / math.log(2)

    def strides(self, x: Tensor) -> tuple[int, int, int]:
        """(batch, head, token) of x [B, H, T, D], or of x [tokens, H, D] where sequences are cut out of it."""
        if x.ndim == 4:
            return x.stride(0), x.stride(1), x.stride(2)
        return 0, x.stride(1), x.stride(0)

    def constants(self, *tensors: Tensor) -> dict[str, Any]:
        """The kernels' compile-time arguments, without the tiles, for q and what else they read."""
        return {
            "LEFT": self.left >= 0,
            "RIGHT": self.right >= 0,
            "RAGGED": self.starts_q is not None,
            "D": self.width,
            "BLOCK_D": self.padded,
            **dots(tensors[0].dtype),
            "TMA": copy_engine(*tensors),
        }


def copy_engine(*tensors: Tensor) -> bool:
    """Whether Hopper's copy engine (TMA) can read these: 16-bit elements, addresses and strides multiples of 16 bytes.

    It also needs memory for its descriptors, which Triton asks the caller to provide. Not on sm_120, which has it too:
    from what it brings Triton 3.6 makes operands of that card's matrix unit in registers, and spills by kilobytes.
    """
    first = tensors[0]
    if first.itemsize != 2 or INTERPRETED or not 90 <= capability(first.device) < 120:
        return False
    if any(x.data_ptr() % 16 for x in tensors if not x.is_meta):
        return False
    if any(stride % 8 or stride == 0 for x in tensors for stride in (*x.stride()[:-1], x.shape[-1])):
        return False
    device = first.device  # alone: Triton keeps the function, and with it a tensor of ours
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device=device, dtype=torch.int8))
    return True


def readable(x: Tensor) -> Tensor:
    """x, or a copy if the kernels cannot walk it: elements of a head side by side, rows within 2**24 elements."""
    walkable = x.stride(-1) == 1 and all(0 <= stride < 2**24 for stride in x.stride()[1:-1])
    return x if walkable or x.numel() == 0 else x.contiguous()


def check_heads(operation: str, q: Tensor, k: Tensor, v: Tensor, dims: int = 4) -> None:
    """Raise unless these can be attended; heads are the second of `dims` dimensions, a batch of 4 the first."""
    floating(operation, q=q, k=k, v=v)
    one_device(operation, q=q, k=k, v=v)
    if q.ndim != dims or k.ndim != dims or (dims == 4 and q.shape[0] != k.shape[0]):
        wanted = "[batch, heads, tokens, width] of one batch" if dims == 4 else "[tokens, heads, width]"
        raise ValueError(f"{operation}: q {list(q.shape)} and k {list(k.shape)} must be {wanted}")
    if k.shape != v.shape:
        raise ValueError(f"{operation}: k {list(k.shape)} and v {list(v.shape)} must have the same shape")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"{operation}: q is {q.dtype}, k {k.dtype} and v {v.dtype}: one dtype is needed")
    if q.shape[-1] != k.shape[-1] or not 1 <= q.shape[-1] <= WIDEST:
        raise ValueError(
            f"{operation}: heads of q and k are {q.shape[-1]} and {k.shape[-1]} wide; they must be equal, 1 to {WIDEST}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{operation}: {q.shape[1]} heads of q do not share {k.shape[1]} heads of k and v evenly")


def reach(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    """-> (left, right), -1 for no limit, at most `FARTHEST`."""
    window = (-1, -1) if window is None else window
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window is {window!r}: it must be (keys before a query, keys after it)")
    left, right = window
    whole("window", left=left, right=right)
    if left < -1 or right < -1:
        raise ValueError(f"window is {window}: keys before and after a query, each 0 or more, or -1 for all of them")
    return min(left, FARTHEST), 0 if causal else min(right, FARTHEST)


def check_scale(scale: float | None, width: int) -> float:
    scale = width**-0.5 if scale is None else scale
    number("attention", -math.inf, scale=scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}: it must be a positive number")
    return scale
