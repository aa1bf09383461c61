"""Gated linear units: SwiGLU = silu(gate) * up, GeGLU = gelu(gate) * up, in one pass over the memory.

Forward moves 3 n b bytes for n outputs of b bytes (read gate and up, write y). Backward moves 5 n b (read the gradient,
gate and up, write both gradients) and computes the activation again, so that nothing but the inputs is kept. About 10
FLOPs an element: the memory is the limit. gate and up may be the halves of one tensor, without a copy.
Shazeer 2020, arXiv:2002.05202. DeepSpeed's file: csrc/transformer/inference/csrc/gelu.cu (fused_gate_activation).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.kernels.case import Case, short
from refimpl.kernels.checks import floating, one_device, rows, same_shape
from refimpl.kernels.language import INTERPRETED, on, once_differentiable, takes, tl, triton
from refimpl.kernels.tiles import next_power_of_2

ACTIVATIONS = {"silu": 0, "tanh": 1, "none": 2}  # the last two are torch's names for GELU's approximations


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate and up [...] of one shape and dtype -> silu(gate) * up. Any strides; may be empty.

    Raises TypeError for a dtype that is no float, ValueError for shapes, dtypes or devices that differ.
    """
    return gated("swiglu", gate, up, "silu")


def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """gate and up [...] of one shape and dtype -> gelu(gate) * up; `approximate` "tanh" or "none", as torch has it."""
    if approximate not in ("tanh", "none"):
        raise ValueError(f'geglu: approximate is {approximate!r}; it must be "tanh" or "none"')
    return gated("geglu", gate, up, approximate)


def gated(operation: str, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    floating(operation, gate=gate, up=up)
    one_device(operation, gate=gate, up=up)
    same_shape(operation, gate=gate, up=up)
    if gate.dtype != up.dtype:
        raise ValueError(f"{operation}: gate is {gate.dtype}, up {up.dtype}; they must have one dtype")
    if gate.numel() == 0 or gate.dim() == 0 or not takes(gate, up):
        return reference(gate, up, activation)
    with on(gate):
        y: Tensor = GLU.apply(gate, up, ACTIVATIONS[activation])  # type: ignore[no-untyped-call]
        return y


def reference(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """The same by torch's operators."""
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=activation)) * up


@triton.jit
def activate(x, KIND: tl.constexpr):
    """The activation and its derivative, of x in fp32."""
    if KIND == 0:
        s = tl.sigmoid(x)
        return x * s, s * (1 + x * (1 - s))
    elif KIND == 1:
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        return x * s, s + x * s * (1 - s) * (1.5957691216057308 + 0.21406659647 * x * x)
    else:
        s = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        return x * s, s + x * tl.exp(-0.5 * x * x) * 0.3989422804014327


@triton.jit
def place(size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """This program's rows [R, 1] and columns [1, BLOCK]; a grid's second dimension would end at 65,535 programs."""
    across = tl.cdiv(size, BLOCK)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    return row[:, None], col[None, :]


@triton.jit
def forward_kernel(
    gate, up, y, rows, size, stride_gate: tl.int64, stride_up: tl.int64, stride_y: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row, col = place(size, ROWS, BLOCK)
    mask = (row < rows) & (col < size)
    value, _ = activate(tl.load(gate + row * stride_gate + col, mask, 0.0).to(tl.float32), KIND)
    value *= tl.load(up + row * stride_up + col, mask, 0.0).to(tl.float32)
    tl.store(y + row * stride_y + col, value.to(y.dtype.element_ty), mask)


@triton.jit
def backward_kernel(
    gate, up, grad, dgate, dup, rows, size,
    stride_gate: tl.int64, stride_up: tl.int64, stride_grad: tl.int64, stride_dx: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row, col = place(size, ROWS, BLOCK)
    mask = (row < rows) & (col < size)
    value, slope = activate(tl.load(gate + row * stride_gate + col, mask, 0.0).to(tl.float32), KIND)
    g = tl.load(grad + row * stride_grad + col, mask, 0.0).to(tl.float32)
    u = tl.load(up + row * stride_up + col, mask, 0.0).to(tl.float32)
    tl.store(dgate + row * stride_dx + col, (g * u * slope).to(dgate.dtype.element_ty), mask)
    tl.store(dup + row * stride_dx + col, (g * value).to(dup.dtype.element_ty), mask)


def launch(rows: int, size: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid and the tile: 4096 elements a program, at most 1024 of a row, so that few lanes hang over its end."""
    block = min(max(next_power_of_2(size), 16), 1024)
    high = (1 << 16 if INTERPRETED else 4096) // block
    return (triton.cdiv(rows, high) * triton.cdiv(size, block),), {"ROWS": high, "BLOCK": block, "num_warps": 8}


class GLU(torch.autograd.Function):
    """The kernels as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: int) -> Tensor:
        a, b = rows(gate), rows(up)  # [M, N]
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        grid, tile = launch(*a.shape)
        forward_kernel[grid](a, b, y, *a.shape, a.stride(0), b.stride(0), a.shape[1], KIND=kind, **tile)
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        a, b, g = rows(gate), rows(up), rows(grad)
        dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
        grid, tile = launch(*a.shape)
        strides = a.stride(0), b.stride(0), g.stride(0), a.shape[1]
        backward_kernel[grid](a, b, g, dgate, dup, *a.shape, *strides, KIND=ctx.kind, **tile)
        return dgate, dup, None


def _case(name: str, m: int, n: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        return tuple(torch.randn(m, n, device=device, dtype=dtype).requires_grad_() for _ in range(2))

    def exact(gate: Tensor, up: Tensor) -> Tensor:
        return reference(gate, up, "silu" if name == "swiglu" else "tanh")

    moved = m * n * dtype.itemsize
    call = swiglu if name == "swiglu" else geglu
    return Case(f"{name} {short(dtype)} {m}x{n}", call, exact, inputs, 3 * moved, 5 * moved)


CASES = (_case("swiglu", 16384, 11008), _case("geglu", 8192, 14336))
SMALL = (_case("swiglu", 1024, 2816, torch.float32), _case("geglu", 1024, 2816, torch.float32))
