"""A matrix product of 8-bit integers, exact in 32 bits, scaled to floats as it is written.

y[m, n] = a_scale[m] b_scale[n] sum_k a[m, k] b[n, k], b laid out as a linear layer's weight. 2 M N K operations at
twice the rate of bf16 (on an H100 1979 T a second, dense); M K + N K + 2 M N bytes with 16-bit results. Above some 600
operations a byte, K of a thousand or so, arithmetic is the limit; below, with few rows as in decoding, the weight's
bytes are, half of bf16's. A program makes one tile of y and walks along K, the loads of the next steps under way.
Neighbouring programs share rows of tiles (groups of 8), so that both inputs are found in the second-level cache. A K
that is no multiple of 16 costs a copy of both. No gradient: codes have none.
Dettmers et al. 2022, arXiv:2208.07339, section 2.1; Tillet et al. 2019 (Triton), section 5.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.kernels.case import Case
from refimpl.kernels.checks import FLOATS, floating, one_device, present, rows, tensors
from refimpl.kernels.language import on, takes, tl, triton

MOST = (2**31 - 1) // (128 * 128)  # products of -128 by -128 that 32 bits can add


def int8_matmul(
    a: Tensor, b: Tensor, a_scale: Tensor | None = None, b_scale: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """a int8 [M, K], b int8 [N, K], a_scale [M] and b_scale [N] or None for ones -> [M, N].

    In `dtype`: by default fp32 with scales, and int32, exact, without. Any strides; sizes may be 0. Raises TypeError
    for other dtypes, ValueError for sizes and devices that do not fit or a K whose sums need more than 32 bits.
    """
    tensors("int8_matmul", a=a, b=b)
    floating("int8_matmul", **present(a_scale=a_scale, b_scale=b_scale))
    one_device("int8_matmul", a=a, b=b, a_scale=a_scale, b_scale=b_scale)
    if a.dtype != torch.int8 or b.dtype != torch.int8:
        raise TypeError(f"int8_matmul: a is {a.dtype}, b {b.dtype}; both must be torch.int8")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"int8_matmul: a [M, K] is {list(a.shape)}, b [N, K] is {list(b.shape)}: K must be the same")
    for name, scale, size in (("a_scale", a_scale, len(a)), ("b_scale", b_scale, len(b))):
        if scale is not None and scale.shape != (size,):
            raise ValueError(f"int8_matmul: {name} has shape {list(scale.shape)}, not [{size}]")
    if a.shape[1] > MOST:
        raise ValueError(f"int8_matmul: K is {a.shape[1]}, but above {MOST} a sum may need more than 32 bits")
    scaled = a_scale is not None or b_scale is not None
    dtype = dtype or (torch.float32 if scaled else torch.int32)
    if dtype not in FLOATS and (scaled or dtype != torch.int32):
        raise TypeError(f"int8_matmul: dtype is {dtype}; it must be a float, or int32 without scales")
    if not takes(a, b, a_scale, b_scale) or dtype == torch.float64 or 0 in (*a.shape, len(b)):
        return reference(a, b, a_scale, b_scale, dtype)
    return launch(a, b, a_scale, b_scale, dtype)


def reference(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The same by torch's operators."""
    exact = torch._int_mm(a, b.t()) if a.device.type == "cpu" and a.numel() and len(b) else _whole(a, b)
    if a_scale is None and b_scale is None:
        return exact.to(dtype)
    y = exact.double() if dtype == torch.float64 else exact.float()
    y = y if a_scale is None else y * a_scale[:, None].to(y.dtype)
    y = y if b_scale is None else y * b_scale.to(y.dtype)
    return y.to(dtype)


def _whole(a: Tensor, b: Tensor) -> Tensor:
    """a b^T in int32, through float64, which holds every such sum."""
    return (a.double() @ b.double().t()).to(torch.int32)


@triton.jit
def kernel(
    a, b, y, a_scale, b_scale, m, n, k,
    a_m: tl.int64, b_n: tl.int64, y_m: tl.int64,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr,
):  # fmt: skip
    high, wide = tl.cdiv(m, M), tl.cdiv(n, N)
    group = tl.program_id(0) // (8 * wide)  # eight rows of tiles, gone through column by column
    lines = tl.minimum(high - group * 8, 8)
    inside = tl.program_id(0) % (8 * wide)
    row = (group * 8 + inside % lines) * M + tl.arange(0, M)
    col = (inside // lines) * N + tl.arange(0, N)
    step = tl.arange(0, K)
    at_a = a + (row % m)[:, None] * a_m + step[None, :]  # beyond the edge: any row, never stored
    at_b = b + step[:, None] + (col % n)[None, :] * b_n
    total = tl.zeros([M, N], tl.int32)
    for start in range(0, k, K):
        left = tl.load(at_a, (start + step < k)[None, :], 0)
        right = tl.load(at_b, (start + step < k)[:, None], 0)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
        at_a += K
        at_b += K
    mask = (row < m)[:, None] & (col < n)[None, :]
    at_y = y + row[:, None] * y_m + col[None, :]
    if y.dtype.element_ty == tl.int32:
        tl.store(at_y, total, mask)
    else:
        result = total.to(tl.float32)
        if A_SCALE:
            result *= tl.load(a_scale + row, row < m, 0.0).to(tl.float32)[:, None]
        if B_SCALE:
            result *= tl.load(b_scale + col, col < n, 0.0).to(tl.float32)[None, :]
        tl.store(at_y, result.to(y.dtype.element_ty), mask)


def in_sixteens(x: Tensor) -> Tensor:
    """x [M, K], or a copy with zeros behind each row: loads of 16 bytes. Byte by byte a tile is more loads, and places
    to remember, than a thread has registers.
    """
    there = x.shape[1] % 16 == 0 == x.stride(0) % 16 and (x.is_meta or x.data_ptr() % 16 == 0)
    return x if there else F.pad(x, (0, -x.shape[1] % 16)).contiguous()


def launch(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    a, b = in_sixteens(rows(a)), in_sixteens(rows(b))  # the tensor cores want both along K
    (m, k), n = a.shape, len(b)
    y = torch.empty(m, n, dtype=dtype, device=a.device)
    high, wide, warps = (128, 64 if n % 16 else 256, 8) if m > 64 else (64, 32, 4)  # odd rows are stored one by one
    scales = [scale if scale is None else scale.contiguous() for scale in (a_scale, b_scale)]
    with on(a):
        kernel[(triton.cdiv(m, high) * triton.cdiv(n, wide),)](
            a, b, y, *scales, m, n, k, a.stride(0), b.stride(0), n,
            M=high, N=wide, K=128, A_SCALE=a_scale is not None, B_SCALE=b_scale is not None,
            num_warps=warps, num_stages=3,
        )  # fmt: skip
    return y


def _case(m: int, n: int, k: int) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        a, b = (torch.randint(-127, 128, shape, device=device, dtype=torch.int8) for shape in ((m, k), (n, k)))
        return a, b, torch.rand(m, device=device), torch.rand(n, device=device), torch.bfloat16

    def exact(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
        return reference(a, b, a_scale, b_scale, torch.float64 if a_scale.dtype == torch.float64 else dtype)

    return Case(
        f"int8_matmul {m}x{n}x{k}", int8_matmul, exact, inputs, m * k + n * k + 2 * m * n, flops=2 * m * n * k
    )  # fmt: skip


CASES = (_case(8192, 8192, 8192), _case(16, 8192, 8192), _case(1000, 1001, 1002))
SMALL = (_case(512, 512, 512),)
