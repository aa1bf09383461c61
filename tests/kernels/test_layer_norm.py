"""LayerNorm's kernels beside float64: odd sizes, strides, no weight or bias, nothing at all, and what is refused."""

import pytest
import torch
from agreement import assert_agrees

from refimpl.kernels import layer_norm as room
from refimpl.kernels.layer_norm import layer_norm, reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 129), (300, 16), (1000,)], ids=str)
def test_equals_float64(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias = (
        torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in (shape, shape[-1:], shape[-1:])
    )
    assert_agrees(layer_norm, reference, (x, weight, bias))


@pytest.mark.parametrize("long", [False, True])
def test_without_weight_or_bias(device: torch.device, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if long:
        monkeypatch.setattr(room, "LONGEST", 64)
        monkeypatch.setattr(room, "LONGEST_BACKWARD", 64)
    x = torch.randn(7, 201, device=device, requires_grad=True)
    vector = torch.randn(201, device=device, requires_grad=True)
    for weight, bias in ((None, None), (vector, None), (None, vector), (vector, vector.detach().requires_grad_())):
        assert_agrees(layer_norm, reference, (x, weight, bias, 1e-3))


def test_any_strides(device: torch.device) -> None:
    base = torch.randn(6, 40, 10, device=device)
    for x in (base[:, 3:20], base[::2, :, ::3], base.transpose(0, 2)):
        assert_agrees(layer_norm, reference, (x.detach().requires_grad_(),))


def test_a_mean_far_from_zero_does_not_cost_the_variance(device: torch.device) -> None:
    x = 1000 + torch.randn(4, 500, device=device)
    assert_agrees(layer_norm, reference, (x,), bound=1e-4)  # x itself is known to 6e-5


@pytest.mark.parametrize("shape", [(0, 5), (4, 0)], ids=str)
def test_nothing_gives_nothing(device: torch.device, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    bias = torch.randn(shape[-1], device=device, requires_grad=True)
    y = layer_norm(x, None, bias)
    y.sum().backward()
    assert y.shape == x.shape
    assert bias.grad is not None
    assert bias.grad.count_nonzero() == 0


def test_what_cannot_be_is_refused(device: torch.device) -> None:
    x = torch.randn(3, 8, device=device)
    with pytest.raises(ValueError, match=r"layer_norm: bias has shape \[7\], but x's last dimension is 8"):
        layer_norm(x, None, torch.ones(7, device=device))
    with pytest.raises(TypeError, match=r"layer_norm: weight is torch.int32"):
        layer_norm(x, torch.ones(8, device=device, dtype=torch.int32))
