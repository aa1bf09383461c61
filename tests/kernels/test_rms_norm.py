"""RMSNorm's kernels beside float64: odd sizes, strides, no weight, nothing at all, and what is refused."""

import pytest
import torch
from agreement import assert_agrees

from refimpl.kernels import rms_norm as room
from refimpl.kernels.rms_norm import reference, rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (1, 3), (2, 3, 129), (300, 16), (1000,)], ids=str)
def test_equals_float64(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(shape[-1], device=device, dtype=dtype, requires_grad=True)
    assert_agrees(rms_norm, reference, (x, weight, 1e-5))


def test_longer_rows_than_registers_hold(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LONGEST", 64)
    monkeypatch.setattr(room, "LONGEST_BACKWARD", 64)
    x = torch.randn(7, 201, device=device, requires_grad=True)
    weight = torch.randn(201, device=device, requires_grad=True)
    assert_agrees(rms_norm, reference, (x, weight))
    assert_agrees(rms_norm, reference, (x, None))


def test_any_strides(device: torch.device) -> None:
    base = torch.randn(6, 40, 10, device=device)
    for x in (base[:, 3:20], base[::2, :, ::3], base.transpose(0, 2), base[..., :1].expand(6, 40, 5)):
        leaf = x.detach().requires_grad_()
        assert_agrees(rms_norm, reference, (leaf, torch.randn(x.shape[-1], device=device)))


def test_a_gradient_may_be_a_view_too(device: torch.device) -> None:
    x = torch.randn(4, 6, device=device, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    rms_norm(x).sum().backward()  # an expanded scalar
    reference(exact).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, atol=1e-6, rtol=1e-5)


def test_a_weight_in_fp32_beside_bf16(device: torch.device) -> None:
    x = torch.randn(9, 33, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(33, device=device, requires_grad=True)
    assert rms_norm(x, weight).dtype == torch.bfloat16
    assert_agrees(rms_norm, reference, (x, weight))


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0,)], ids=str)
def test_nothing_gives_nothing(device: torch.device, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    weight = torch.randn(shape[-1], device=device, requires_grad=True)
    y = rms_norm(x, weight)
    y.sum().backward()
    assert y.shape == x.shape
    assert weight.grad is not None
    assert weight.grad.count_nonzero() == 0


def test_large_values_do_not_overflow_in_fp16(device: torch.device) -> None:
    x = torch.full((2, 64), 6e4, device=device, dtype=torch.float16)
    assert torch.equal(rms_norm(x), torch.ones_like(x))


def test_what_cannot_be_is_refused(device: torch.device) -> None:
    x = torch.randn(3, 8, device=device)
    with pytest.raises(ValueError, match=r"rms_norm: weight has shape \[7\], but x's last dimension is 8"):
        rms_norm(x, torch.ones(7, device=device))
    with pytest.raises(TypeError, match=r"rms_norm: x is torch.int64"):
        rms_norm(torch.ones(3, 8, device=device, dtype=torch.int64))
    with pytest.raises(ValueError, match="scalar"):
        rms_norm(torch.tensor(1.0, device=device))
    with pytest.raises(ValueError, match=r"x on .*, weight on meta"):
        rms_norm(x, torch.ones(8, device="meta"))


def test_the_gradient_has_no_gradient(device: torch.device) -> None:
    x = torch.randn(3, 8, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(rms_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
