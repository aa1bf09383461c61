"""The norm of many tensors together, in one launch: what clipping asks of all gradients at once.

Each tensor is read once, n b bytes for n elements of b bytes, and nothing is written but 8 bytes a program; two FLOPs
an element: the memory is the limit. One launch a tensor would cost more than the reading where tensors are small (a
bias of 4096 elements takes 3 ns to read, its launch 3000). The kernel gets a table of addresses instead, and of which
16384 elements of which tensor each program reads. Squares are added in fp32 within a program, in float64 across
programs, in a fixed order. The square of 1e30 is no fp32 number, nor is that of 1e-30: the large and the small are
added apart, scaled by a power of 2 (Blue 1978, ACM TOMS 4(1)). A norm that is inf or NaN so says that some gradient
overflowed, or that the norm itself is no fp32 number; the host is not asked.
DeepSpeed's file: csrc/adam/multi_tensor_apply.cuh; NVIDIA Apex: csrc/multi_tensor_l2norm_kernel.cu.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from refimpl.kernels.case import Case
from refimpl.kernels.checks import floating, number, present
from refimpl.kernels.language import on, takes, tl, triton

CHUNK = 1 << 14  # elements of a program
BLOCK = 4096
# 2**14 squares of numbers between them are fp32 numbers; so are larger ones' times DOWN, and smaller ones' times UP.
HUGE, TINY = tl.constexpr(2.0**56), tl.constexpr(2.0**-49)
DOWN, UP = tl.constexpr(2.0**-72), tl.constexpr(2.0**77)


def multi_norm(tensors: Sequence[Tensor | None], order: float = 2.0) -> Tensor:
    """The 2-norm or, for `order` inf, the largest absolute value, of all tensors as one vector: an fp32 scalar.

    Any shapes, strides and floating dtypes, on one device; None, a gradient that there is not, counts nothing, and of
    nothing the norm is 0. Raises TypeError for a dtype that is no float, ValueError for another order or several
    devices.
    """
    named = present(**{f"tensor {i}": t for i, t in enumerate(tensors)})
    floating("multi_norm", **named)
    number("multi_norm", 0, order=order)
    there = [t.detach() for t in named.values()]
    if order not in (2, math.inf):
        raise ValueError(f"multi_norm: order is {order}; it must be 2 or inf")
    if len({t.device for t in there}) > 1:
        raise ValueError(f"multi_norm: the tensors are on {sorted({str(t.device) for t in there})}; one is needed")
    there = [t for t in there if t.numel()]
    if not there or not takes(*there):
        return reference(there, order)
    with on(there[0]):
        kinds = sorted({t.dtype for t in there}, key=str)
        parts = torch.cat([partial([t for t in there if t.dtype == kind], order) for kind in kinds])
    return parts.sum().sqrt().float() if order == 2 else parts.max()


def reference(tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """The same by torch's operators: a norm of norms. float64 tensors give a float64 norm."""
    tensors = [t for t in tensors if t.numel()]
    if not tensors:
        return torch.zeros(())
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    norms = torch._foreach_norm(tensors, order, dtype=torch.float64 if order == 2 else wide)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), order).to(wide)
    return norm


@triton.jit
def taken_in(total, large, small, value, SQUARES: tl.constexpr):
    value = value.to(tl.float32)
    size = tl.abs(value)
    if SQUARES:
        is_large, is_small = size > HUGE, size < TINY  # a NaN is neither
        down = tl.where(is_large, value * DOWN, 0.0)
        up = tl.where(is_small, value * UP, 0.0)
        mid = tl.where(is_large | is_small, 0.0, value)
        return total + mid * mid, large + down * down, small + up * up
    return tl.where((size > total) | (size != size), size, total), large, small  # keeps a NaN, which a maximum may drop


@triton.jit
def kernel(
    addresses, sizes, owner, place, parts, like,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, SQUARES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Program i reads chunk place[i] of tensor owner[i]. `like`: a tensor of the dtype of all of them."""
    which = tl.load(owner + tl.program_id(0))
    first = tl.load(place + tl.program_id(0)).to(tl.int64) * CHUNK
    size = tl.load(sizes + which) - first
    x = tl.load(addresses + which).to(like.dtype) + first
    total = tl.zeros([BLOCK], tl.float32)
    large = tl.zeros([BLOCK], tl.float32)
    small = tl.zeros([BLOCK], tl.float32)
    if size >= CHUNK:
        if ALIGNED:  # which the compiler cannot know of an address that it reads; loads are then 16 bytes wide
            x = tl.multiple_of(x, 16)
        for start in tl.static_range(0, CHUNK, BLOCK):
            value = tl.load(x + start + tl.arange(0, BLOCK))
            total, large, small = taken_in(total, large, small, value, SQUARES)
    else:
        for start in tl.static_range(0, CHUNK, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total, large, small = taken_in(total, large, small, tl.load(x + at, at < size, 0.0), SQUARES)
    if SQUARES:
        wide = tl.sum(large, 0).to(tl.float64) / (DOWN * DOWN) + tl.sum(small, 0).to(tl.float64) / (UP * UP)
        tl.store(parts + tl.program_id(0), tl.sum(total, 0).to(tl.float64) + wide)
    else:
        bad = tl.sum((total != total).to(tl.int32), 0) > 0
        tl.store(parts + tl.program_id(0), tl.where(bad, float("nan"), tl.max(total, 0)))


def partial(tensors: list[Tensor], order: float) -> Tensor:
    """A sum of squares, fp64, or a maximum, fp32, for each program: [programs]. All tensors have one dtype."""
    dense = [t if t.is_contiguous() else t.contiguous() for t in tensors]  # alive until the launch
    device = dense[0].device
    with torch.device("cpu"):  # whatever the default is
        chunks = torch.tensor([-(-t.numel() // CHUNK) for t in dense])
        owner = torch.repeat_interleave(torch.arange(len(dense)), chunks)
        place = torch.arange(len(owner)) - (chunks.cumsum(0) - chunks)[owner]
        addresses = torch.tensor([0 if t.is_meta else t.data_ptr() for t in dense])
        sizes = torch.tensor([t.numel() for t in dense])
    table = torch.cat([addresses, sizes, owner, place])  # one copy to the device
    table = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)
    tables = torch.split(table, [len(dense), len(dense), len(owner), len(owner)])
    aligned = not bool((addresses % 16).any())
    parts = torch.empty(len(owner), dtype=torch.float64 if order == 2 else torch.float32, device=device)
    kernel[(len(owner),)](
        *tables, parts, dense[0].view(-1), CHUNK=CHUNK, BLOCK=BLOCK, SQUARES=order == 2, ALIGNED=aligned, num_warps=8
    )
    return parts


def _case(sizes: list[int], name: str, dtype: torch.dtype) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        return tuple(torch.randn(size, device=device, dtype=dtype) for size in sizes)

    def call(*tensors: Tensor) -> Tensor:
        return multi_norm(tensors)

    def exact(*tensors: Tensor) -> Tensor:
        return reference(tensors)

    return Case(f"multi_norm {name}", call, exact, inputs, dtype.itemsize * sum(sizes), bound=1e-5)


LAYER = [4096 * 4096] * 4 + [4096 * 11008] * 3 + [4096] * 2
CASES = (_case(LAYER * 2, "bf16, two layers of 7B", torch.bfloat16),)
SMALL = (_case([512 * 512] * 4 + [512] * 40, "fp32, 44 tensors", torch.float32),)
