"""Small arguments that are views of larger tensors (weights, tables, places, starts) mean what their copies mean."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from refimpl.kernels.cross_entropy import cross_entropy
from refimpl.kernels.flash_attention import flash_attention_varlen
from refimpl.kernels.grouped_matmul import grouped_matmul
from refimpl.kernels.int8_matmul import int8_matmul
from refimpl.kernels.layer_norm import layer_norm
from refimpl.kernels.linear_cross_entropy import linear_cross_entropy
from refimpl.kernels.paged_attention import paged_attention
from refimpl.kernels.permute import Order, permute, sort_by_expert, unpermute
from refimpl.kernels.quantize import dequantize, quantize
from refimpl.kernels.rms_norm import rms_norm
from refimpl.kernels.rotary import rotary

View = Callable[[Tensor], Tensor]
AIMS = torch.tensor([3, 0, 5, 1, 2, 4])
STARTS = torch.tensor([0, 2, 6], dtype=torch.int32)
EXPERTS = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0], [1, 2]])


def spread(x: Tensor) -> Tensor:
    """The same values with others between them."""
    return torch.stack((x, x + 1), -1)[..., 0]


def placed(x: Tensor, view: View) -> Tensor:
    order = sort_by_expert(EXPERTS.to(x.device), 3)
    order = Order(view(order.place), view(order.counts))
    return unpermute(permute(x, order), order, view(EXPERTS.to(x) / 3))


def paged(x: Tensor, view: View) -> Tensor:
    pages = torch.arange(64.0, device=x.device).sin().view(2, 4, 1, 8)
    table, lengths = (torch.tensor(t, device=x.device) for t in ([[1, 0], [0, 1]], [5, 3]))
    return paged_attention(x.detach()[:4].view(2, 2, 8), pages, pages, view(table), view(lengths))


def coded(x: Tensor, view: View) -> Tensor:
    codes, scales = quantize(x.detach(), 16)
    return dequantize(view(codes), view(scales), 16)


CALLS: dict[str, Callable[[Tensor, View], Tensor]] = {
    "rms_norm": lambda x, view: rms_norm(x, view(x.detach()[0])),
    "layer_norm": lambda x, view: layer_norm(x, view(x.detach()[0]), view(x.detach()[1])),
    "cross_entropy": lambda x, view: cross_entropy(x, view(AIMS.to(x.device)), reduction="none"),
    "linear_cross_entropy": lambda x, view: linear_cross_entropy(
        x, view(x.detach()), view(AIMS.to(x.device)), view(x.detach()[:, 0])
    ),
    "rotary": lambda x, view: rotary(x.view(1, 2, 3, 8), view(x.detach()[:3, :4]), view(x.detach()[3:, :4])),
    "flash_attention_varlen": lambda x, view: flash_attention_varlen(
        x[:, None], x[:, None], x[:, None], view(STARTS.to(x.device)), view(STARTS.to(x.device))
    ),
    "grouped_matmul": lambda x, view: grouped_matmul(
        x, view(x.detach().view(2, 3, 8).mT), view(torch.tensor([4, 2], device=x.device))
    ),
    "int8_matmul": lambda x, view: int8_matmul(
        view(EXPERTS.to(x.device).char()), view(EXPERTS.to(x.device).char()), view(x.detach()[:, 0]), view(x[:, 1])
    ),
    "permute": placed,
    "paged_attention": paged,
    "dequantize": coded,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_view_is_its_copy(device: torch.device, name: str) -> None:
    x = torch.randn(6, 8, device=device)
    found = []
    for view in (spread, torch.clone):
        leaf = x.clone().requires_grad_(name != "int8_matmul")
        y = CALLS[name](leaf, view)
        if y.requires_grad:
            y.square().sum().backward()
        found.append((y.detach(), leaf.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
