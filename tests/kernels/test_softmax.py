"""Softmax's kernels beside float64: odd sizes, strides, other dimensions, rows of -inf, and what is refused."""

import pytest
import torch
from agreement import assert_agrees

from refimpl.kernels import softmax as room
from refimpl.kernels.softmax import reference, softmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 129), (300, 16), (1000,), (4, 1)], ids=str)
def test_equals_float64(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, device=device, dtype=dtype).mul(5).requires_grad_()
    # The gradient is made of a result that was cut to bf16: 2**-7, in each of its two factors and at its end.
    assert_agrees(softmax, reference, (x,), bound=3 * 2**-7 if dtype == torch.bfloat16 else None)


def test_longer_rows_than_registers_hold(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LONGEST", 64)
    monkeypatch.setattr(room, "LONGEST_BACKWARD", 64)
    x = torch.randn(7, 201, device=device).mul(20)
    x[0, :130] = float("-inf")
    x[1, 64:] = float("-inf")
    assert_agrees(softmax, reference, (x.requires_grad_(),), bound=1e-5)  # exp(60) knows its argument to 4e-6


def test_another_dimension_and_any_strides(device: torch.device) -> None:
    base = torch.randn(6, 40, 10, device=device)
    for dim in (0, 1, 2, -2):
        assert_agrees(softmax, reference, (base[:, ::3].detach().requires_grad_(), dim))


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by numpy, which interprets; a GPU says nothing
def test_extremes_are_torchs(device: torch.device) -> None:
    low, high = float("-inf"), float("inf")
    x = torch.tensor([[low, low, low], [1e38, -1e38, 0], [high, 1, 2], [low, 3, low]], device=device)
    assert torch.equal(softmax(x).isnan(), torch.softmax(x, -1).isnan())
    assert torch.equal(softmax(x).nan_to_num(), torch.softmax(x, -1).nan_to_num())


@pytest.mark.parametrize("shape", [(0, 5), (4, 0)], ids=str)
def test_nothing_gives_nothing(device: torch.device, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    softmax(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


def test_one_number(device: torch.device) -> None:
    x = torch.tensor(3.0, device=device, requires_grad=True)
    for dim in (0, -1):
        assert_agrees(softmax, reference, (x, dim))
    with pytest.raises(IndexError, match="softmax: dim is 1, but x has 0 dimensions"):
        softmax(x, 1)


def test_what_cannot_be_is_refused(device: torch.device) -> None:
    with pytest.raises(IndexError, match="softmax: dim is 2, but x has 2 dimensions"):
        softmax(torch.randn(3, 8, device=device), 2)
    with pytest.raises(TypeError, match=r"softmax: x is torch.int64"):
        softmax(torch.ones(3, 8, device=device, dtype=torch.int64))


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(2, 5, requires_grad=True)
    (grad,) = torch.autograd.grad(softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
