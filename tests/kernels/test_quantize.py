"""Codes of 8 bits by blocks, and their matrix product, beside torch's own casts and exact integers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from refimpl.kernels import quantize as room
from refimpl.kernels.int8_matmul import int8_matmul, reference
from refimpl.kernels.language import REHEARSING
from refimpl.kernels.quantize import dequantize, quantize

FORMATS = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "block"), [((3, 100), 64), ((1,), 16), ((7, 33), 256), ((4096,), 4096)], ids=str)
def test_codes_are_torchs_bit_by_bit(
    device: torch.device, shape: tuple[int, ...], block: int, of: torch.dtype, dtype: torch.dtype
) -> None:
    x = (torch.randn(shape, device=device) * torch.logspace(-8, 0, shape[-1], device=device)).to(of)
    codes, scales = quantize(x, block, dtype)
    expected, expected_scales = room.reference(x, block, dtype)
    assert torch.equal(codes.view(torch.int8), expected.view(torch.int8))
    assert torch.equal(scales, expected_scales)
    back = dequantize(codes, scales, block)
    assert torch.equal(back, room.dequantize_reference(codes, scales, block, torch.float32))
    top = room.in_blocks(x.reshape(-1).float(), block).abs().amax(1).repeat_interleave(block)[: x.numel()].view(shape)
    step = top / 254 if dtype == torch.int8 else torch.maximum(x.float().abs() / 16, top / 448 / 1024)
    assert bool(((back - x.float()).abs() <= step * (1 + 1e-5)).all())


class DividesAsAGPU(TorchDispatchMode):
    """By a number: torch multiplies by 1 / it there (BinaryDivTrueKernel.cu), which may be off by a unit."""

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.div.Tensor and not (isinstance(args[1], torch.Tensor) and args[1].dim()):
            return args[0] * torch.tensor(1.0).div_(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_reference_has_the_same_bits_on_a_gpu(dtype: torch.dtype) -> None:
    """A unit of the scale decides which way a code goes that lies in the middle: bf16 has many."""
    x = torch.randn(1 << 14).bfloat16()
    codes, scales = room.reference(x, 256, dtype)
    with DividesAsAGPU():
        there, of_there = room.reference(x, 256, dtype)
    assert torch.equal(codes.view(torch.int8), there.view(torch.int8))
    assert torch.equal(scales, of_there)


def test_every_fp8_number_comes_back(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(device)
    values = torch.where(codes.float().isnan(), 448.0, codes.float())  # all 254 of them, and 448 twice more
    found, scales = quantize(values, 256, torch.float8_e4m3fn)
    assert scales.tolist() == [1.0]
    assert torch.equal(found.float(), values)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_block_of_zeros_and_one_that_holds_no_number(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.ones(5, 16, device=device)
    x[0] = 0
    x[2, 3], x[3, 0], x[4, 15] = math.inf, math.nan, -math.inf
    back = dequantize(*quantize(x, 16, dtype), 16)
    assert torch.equal(back[:2], x[:2])
    assert bool(back[2:].isnan().all())


def test_nothing_strides_and_what_is_refused(device: torch.device) -> None:
    x = torch.randn(20, 30, device=device)
    codes, scales = quantize(x.t(), 64)
    assert torch.equal(codes, quantize(x.t().contiguous(), 64)[0])
    assert dequantize(codes, scales, 64, torch.float64).dtype == torch.float64
    empty = quantize(x[:0])
    assert empty[1].shape == (0,)
    assert dequantize(*empty, 256).shape == (0, 30)
    with pytest.raises(ValueError, match="block is 48; it must be a power of two"):
        quantize(x, 48)
    with pytest.raises(TypeError, match=r"codes cannot be torch.uint8"):
        quantize(x, dtype=torch.uint8)
    with pytest.raises(ValueError, match="600 codes in blocks of 64 take 10 fp32 scales, not"):
        dequantize(codes, scales[:9], 64)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 7, 33), (130, 260, 129), (3, 300, 512)])
def test_a_product_of_integers_is_exact(device: torch.device, m: int, n: int, k: int) -> None:
    a, b = (torch.randint(-128, 128, (size, k), device=device, dtype=torch.int8) for size in (m, n))
    exact = (a.cpu().long() @ b.cpu().long().t()).to(device)
    assert torch.equal(int8_matmul(a, b), exact.int())
    assert torch.equal(reference(a, b, None, None, torch.int32), exact.int())
    a_scale, b_scale = torch.rand(m, device=device), torch.rand(n, device=device)
    for scales in ((a_scale, b_scale), (a_scale, None), (None, b_scale), (None, None)):
        wide = [1 if s is None else s.double() for s in scales]
        scaled = exact.double() * (wide[0] if scales[0] is None else wide[0][:, None]) * wide[1]
        for dtype, bound in ((None, 3e-7), (torch.float32, 3e-7), (torch.bfloat16, 2**-7)):
            found = int8_matmul(a, b, *scales, dtype)
            assert float((found.double() - scaled).abs().max()) <= bound * float(scaled.abs().max())


def test_a_product_of_any_strides_or_of_nothing(device: torch.device) -> None:
    a = torch.randint(-128, 128, (40, 30), device=device, dtype=torch.int8)
    b = torch.randint(-128, 128, (40, 24), device=device, dtype=torch.int8)
    assert torch.equal(int8_matmul(a.t(), b.t()), int8_matmul(a.t().contiguous(), b.t().contiguous()))
    assert torch.equal(int8_matmul(a[::2, :24], b[::3]), int8_matmul(a[::2, :24].contiguous(), b[::3].contiguous()))
    assert int8_matmul(a[:0], a).shape == (0, 40)
    assert int8_matmul(a[:, :0], b[:, :0]).count_nonzero() == 0


def test_what_a_product_refuses(device: torch.device) -> None:
    a = torch.ones(4, 8, device=device, dtype=torch.int8)
    with pytest.raises(TypeError, match=r"both must be torch.int8"):
        int8_matmul(a, a.int())
    with pytest.raises(ValueError, match="K must be the same"):
        int8_matmul(a, a[:, :7])
    with pytest.raises(ValueError, match=r"a_scale has shape \[3\], not \[4\]"):
        int8_matmul(a, a, torch.ones(3, device=device))
    with pytest.raises(ValueError, match="may need more than 32 bits"):
        int8_matmul(a[:, :1].expand(4, 1 << 18), a[:, :1].expand(4, 1 << 18))


@pytest.mark.parametrize(("capability", "fp8"), [(80, False), (86, False), (89, True), (90, True)])
def test_fp8_is_converted_where_the_chip_can(capability: int, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "INTERPRETED", False)
    token = REHEARSING.set(capability)
    try:
        assert room.converts(torch.float8_e4m3fn, torch.device("meta")) is fp8
        assert room.converts(torch.int8, torch.device("meta"))
    finally:
        REHEARSING.reset(token)
