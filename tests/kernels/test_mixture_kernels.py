"""A mixture of experts by Triton's kernels is the one by torch's operators: values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.model.experts import StackedExperts
from refimpl.model.gates import Routing, route
from refimpl.model.moe import Combine, Permute, by_kernels

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # sums of 24 products in another order


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_tokens_through_the_kernels(device: torch.device, gated: bool) -> None:
    experts = StackedExperts(24, 40, 4, gated=gated, act=F.silu, std=0.3).to(device)
    x, out_grad = torch.randn(13, 24, device=device), torch.randn(13, 24, device=device)
    routes = route(torch.randn(13, 4, device=device), Routing(k=2))
    rows = routes.rows
    assert rows.all_kept
    found: list[list[Tensor]] = []
    for kernels in (True, False):
        tokens, weights = x.clone().requires_grad_(), routes.weights.detach().clone().requires_grad_()
        experts.zero_grad()
        if kernels:
            y = by_kernels(experts.grouped(by_kernels(tokens, rows), rows.sizes), rows, weights)
        else:
            up, down = experts.up, experts.down
            each = Permute.apply(tokens, rows).split(rows.sizes)
            made = [experts.between(part @ up[e].T) @ down[e].T for e, part in enumerate(each)]
            y = Combine.apply(torch.cat(made), weights, rows)
        (y * out_grad).sum().backward()
        found.append([y.detach(), tokens.grad, weights.grad, experts.up.grad, experts.down.grad])  # type: ignore[list-item]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
