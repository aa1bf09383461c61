"""A mixture of experts by Triton's kernels is the one by torch's operators: values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.kernels.topk_gate import topk_gate
from refimpl.model.experts import StackedExperts
from refimpl.model.gates import FEW, Routing, highest, route
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


@pytest.mark.filterwarnings("ignore:invalid value")  # of the weights, which nobody reads here
@pytest.mark.parametrize("k", [2, FEW])
def test_a_gates_choice_by_the_kernel(device: torch.device, k: int) -> None:
    """What a gate on a GPU calls instead of 2 k operators: the same experts in the same order, equal scores too."""
    scores = torch.randn(50, 13, device=device)
    scores[:10] = scores[:10].round()  # ties
    scores[10:20, 3:] = -torch.inf  # groups that are out
    scores[20] = 0.25
    scores[21, 5] = torch.inf
    assert torch.equal(topk_gate(scores.to(device), k)[1].cpu(), highest(scores.cpu(), k))
