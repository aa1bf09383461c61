"""Under autocast the public functions give the dtypes that torch's operators have on a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from refimpl.kernels.block_sparse_attention import block_sparse_attention
from refimpl.kernels.cross_entropy import cross_entropy
from refimpl.kernels.flash_attention import flash_attention
from refimpl.kernels.grouped_matmul import grouped_matmul
from refimpl.kernels.layer_norm import layer_norm
from refimpl.kernels.rms_norm import rms_norm
from refimpl.kernels.softmax import softmax


def by_heads(call: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: call(*(t.reshape(1, 1, 16, 16) for t in (x, x, w)))


CALLS: dict[str, tuple[Callable[[Tensor, Tensor], Any], torch.dtype]] = {
    "softmax": (lambda x, w: softmax(x), torch.float32),
    "layer_norm": (lambda x, w: layer_norm(x, w[0], w[1]), torch.float32),
    "rms_norm": (lambda x, w: rms_norm(x, w[0]), torch.float32),
    "cross_entropy": (lambda x, w: cross_entropy(x, torch.arange(16, device=x.device)), torch.float32),
    "flash_attention": (by_heads(flash_attention), torch.bfloat16),
    "block_sparse_attention": (
        by_heads(lambda q, k, v: block_sparse_attention(q, k, v, torch.ones(1, 1, 1), 16)),
        torch.bfloat16,
    ),
    "grouped_matmul": (
        lambda x, w: grouped_matmul(x, w[None], torch.tensor([16], device=x.device)),
        torch.bfloat16,
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_are_torchs(device: torch.device, name: str, given: torch.dtype) -> None:
    """x as a layer before it gives it, a weight in fp32: together, where both would be needed in one dtype."""
    call, expected = CALLS[name]
    x = torch.randn(16, 16, device=device).to(given).requires_grad_()
    w = torch.randn(16, 16, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = call(x, w)
        assert y.dtype == expected
        assert call(x.double(), w.double()).dtype == torch.float64
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == given
    assert w.grad is None or w.grad.dtype == torch.float32
