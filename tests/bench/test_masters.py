"""MasterAdamW: torch's AdamW on fp32 copies, rounded into the weights; small steps are not lost."""

import pytest
import torch

from refimpl.bench.masters import MasterAdamW


def test_it_is_adamw_in_fp32_and_the_weights_are_its_rounding() -> None:
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, size).bfloat16()) for size in (64, 100)]
    oracle = [torch.nn.Parameter(w.detach().float()) for w in weights]
    mine, theirs = MasterAdamW(weights, lr=1e-3), torch.optim.AdamW(oracle, lr=1e-3, fused=True)
    for step in range(4):
        for w, o in zip(weights, oracle, strict=True):
            w.grad = torch.randn(w.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
            o.grad = w.grad.float()
        mine.step()
        theirs.step()
    for w, master, o in zip(weights, mine.masters, oracle, strict=True):
        assert torch.equal(master, o)
        assert torch.equal(w, o.bfloat16())


def test_steps_that_bf16_rounds_off_add_up() -> None:
    weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], lr=1e-3)  # half of bf16's spacing below 1 is 2e-3
    for _ in range(8):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert (weight < 1).all()


def test_a_missing_gradient_is_not_passed_over() -> None:
    weights = [torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = MasterAdamW(weights, lr=1e-3)
    weights[0].grad = torch.ones_like(weights[0])
    with pytest.raises(RuntimeError, match="lists must have the same number"):
        optimizer.step()
