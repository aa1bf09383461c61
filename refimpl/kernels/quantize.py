"""Blocks of numbers in 8 bits, each block with one scale in fp32: int8, or fp8 with 4 bits of exponent and 3 of
mantissa.

Quantising moves n b + n + 4 n / B bytes for n numbers of b bytes in blocks of B (read x, write the codes and the
scales), dequantising the same the other way. About 10 FLOPs a number: the memory is the limit. A block's largest
absolute value becomes 127 in int8 or 448 in fp8 (e4m3), so that nothing is cut off; an error is at most half a step:
1/254 of the block's largest value in int8, 1/16 of the number itself in fp8 (below 2**-6 of the scale a step is 2**-9
of it). Rounding to even is done in fp32 before the cast, which then is exact: so a GPU, torch and the interpreter agree
by bits. There is no gradient: a code is a step function. A block that holds inf or NaN becomes NaN as a whole, by its
scale. Dettmers et al. 2021, arXiv:2110.02861, section 2; Micikevicius et al. 2022, arXiv:2209.05433. DeepSpeed's file:
csrc/quantization/quantize.cu.
"""

from typing import Any

import torch
from torch import Tensor

from refimpl.kernels.case import Case
from refimpl.kernels.checks import FLOATS, floating, one_device, tensors, whole
from refimpl.kernels.language import INTERPRETED, capability, on, takes, tl, triton

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
ELEMENTS = 1 << 16 if INTERPRETED else 4096  # of a program
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it leaves no room for a fraction


def quantize(x: Tensor, block: int = 256, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """x [...] -> codes [...] in `dtype` (torch.int8 or torch.float8_e4m3fn), scales [ceil(n / block)] fp32.

    A block is `block` numbers in x's row-major order, a power of two from 16 to 4096; the last may be shorter. Any
    strides; x may be empty. Raises TypeError for other dtypes, ValueError for another block.
    """
    floating("quantize", x=x)
    check(block, dtype)
    if x.numel() == 0 or not takes(x) or not converts(dtype, x.device):
        return reference(x, block, dtype)
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    blocks = triton.cdiv(x.numel(), block)
    scales = torch.empty(blocks, dtype=torch.float32, device=x.device)
    rows = ELEMENTS // block
    with on(x):
        quantize_kernel[(triton.cdiv(blocks, rows),)](
            x.detach(), codes, scales, x.numel(), blocks, LARGEST[dtype],
            ROWS=rows, BLOCK=block, FP8=dtype != torch.int8, num_warps=8,
        )  # fmt: skip
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, block: int = 256, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes [...] and scales [ceil(n / block)], as `quantize` made them -> [...] in `dtype`, a floating one."""
    tensors("dequantize", codes=codes, scales=scales)
    check(block, codes.dtype)
    one_device("dequantize", codes=codes, scales=scales)
    if dtype not in FLOATS:
        raise TypeError(f"dequantize: dtype is {dtype}; it must be float32, bfloat16 or float16")
    blocks = -(-codes.numel() // block)
    if scales.shape != (blocks,) or scales.dtype != torch.float32:
        found = f"{list(scales.shape)} {scales.dtype}"
        raise ValueError(
            f"dequantize: {codes.numel()} codes in blocks of {block} take {blocks} fp32 scales, not {found}"
        )
    if codes.numel() == 0 or dtype == torch.float64 or not takes(scales) or not converts(codes.dtype, codes.device):
        return dequantize_reference(codes, scales, block, dtype)
    codes = codes.contiguous()
    y = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    rows = ELEMENTS // block
    with on(codes):
        dequantize_kernel[(triton.cdiv(blocks, rows),)](
            codes, scales.contiguous(), y, codes.numel(), blocks, ROWS=rows, BLOCK=block, num_warps=8
        )
    return y


def check(block: int, dtype: torch.dtype) -> None:
    whole("quantize", block=block)
    if dtype not in LARGEST:
        raise TypeError(f"quantize: codes cannot be {dtype}; they must be torch.int8 or torch.float8_e4m3fn")
    if block not in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        raise ValueError(f"quantize: block is {block}; it must be a power of two from 16 to 4096")


def converts(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether Triton can: e4m3 on sm_89 and later; what is before (A100, A10) takes torch's operators."""
    return dtype == torch.int8 or INTERPRETED or capability(device) >= 89


def in_blocks(flat: Tensor, block: int) -> Tensor:
    """[n] -> [ceil(n / block), block], with zeros at the end."""
    return torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)


def reference(x: Tensor, block: int = 256, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """The same by torch's operators."""
    values = in_blocks(x.detach().reshape(-1).float(), block)
    largest = values.new_full((1,), LARGEST[dtype])  # a tensor: a number's inverse torch multiplies by, on a GPU
    scales = values.abs().amax(1) / largest  # NaN stays NaN
    scales = torch.where(scales == 0, 1.0, torch.where(scales.isfinite(), scales, torch.nan))
    units = values / scales[:, None]
    units = units.nan_to_num(0)
    return (units.round() if dtype == torch.int8 else units).to(dtype).view(-1)[: x.numel()].view(x.shape), scales


def dequantize_reference(codes: Tensor, scales: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """The same by torch's operators."""
    values = in_blocks(codes.reshape(-1).float(), block) * scales[:, None]
    return values.view(-1)[: codes.numel()].view(codes.shape).to(dtype)


@triton.jit
def quantize_kernel(
    x, codes, scales, size: tl.int64, blocks, largest, ROWS: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(x + at, at < size, 0.0).to(tl.float32)
    good = tl.abs(values) < float("inf")  # neither inf nor NaN
    scale = tl.max(tl.where(good, tl.abs(values), 0.0), 1)
    scale = tl.where(scale == 0, 1.0, tl.div_rn(scale, largest + tl.zeros([ROWS], tl.float32)))
    scale = tl.where(tl.min(good.to(tl.int32), 1) == 0, float("nan"), scale)
    tl.store(scales + row, scale, row < blocks)
    whole = tl.where(scale == scale, scale, 1.0)[:, None] + tl.zeros([ROWS, BLOCK], tl.float32)
    units = tl.where((scale == scale)[:, None], tl.div_rn(tl.where(good, values, 0.0), whole), 0.0)
    if FP8:  # the step of a number's own power of two: 3 bits of mantissa, and 2**-9 below 2**-6
        size_bits = tl.abs(units).to(tl.int32, bitcast=True)
        sign = units.to(tl.int32, bitcast=True) ^ size_bits
        step_bits = (tl.maximum((size_bits >> 23) - 127, -6) - 3 + 127) << 23
        step, inverse = step_bits.to(tl.float32, bitcast=True), (0x7F000000 - step_bits).to(tl.float32, bitcast=True)
        units = (tl.abs(units) * inverse + ROUND - ROUND) * step  # exact: a division on a GPU need not be
        units = (units.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)  # -0 stays -0
    else:
        units = units + ROUND - ROUND
    tl.store(codes + at, units.to(codes.dtype.element_ty), at < size)


@triton.jit
def dequantize_kernel(codes, scales, y, size: tl.int64, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(codes + at, at < size, 0.0).to(tl.float32) * tl.load(scales + row, row < blocks, 0.0)[:, None]
    tl.store(y + at, values.to(y.dtype.element_ty), at < size)


def _case(name: str, dtype: torch.dtype, size: int, back: bool) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        x = torch.randn(size, device=device, dtype=torch.bfloat16)
        return (*reference(x, 256, dtype), 256, torch.bfloat16) if back else (x, 256, dtype)

    def exact(codes: Tensor, scales: Tensor, block: int, dtype: torch.dtype) -> Tensor:
        return dequantize_reference(codes, scales, block, torch.float64)

    def ours(*arguments: Any) -> Tensor:
        codes, scales = quantize(*arguments)
        return dequantize(codes, scales)

    def theirs(*arguments: Any) -> Tensor:
        codes, scales = reference(*arguments)
        return dequantize_reference(codes, scales, 256, torch.float32)

    moved = 3 * size + size // 64
    if back:
        return Case(f"dequantize {name} {size}", dequantize, exact, inputs, moved)
    return Case(f"quantize {name} and back {size}", ours, theirs, inputs, moved + 5 * size + size // 64, bound=1e-6)


LETTERS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
CASES = tuple(_case(name, dtype, 1 << 26, back) for name, dtype in LETTERS.items() for back in (False, True))
SMALL = tuple(_case(name, dtype, 1 << 20, back) for name, dtype in LETTERS.items() for back in (False, True))
