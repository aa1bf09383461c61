"""LAMB against its formula in fp64, and in every ZeRO stage against one process: the norms are of whole parameters."""

import math

import pytest
import torch
from torch import Tensor, nn

from refimpl.optim.lamb import Lamb
from refimpl.optim.one_bit_lamb import OneBitLamb

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6}


def gradients(size: int, steps: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(steps)]


def by_formula(steps: list[Tensor], options: dict[str, float | bool]) -> tuple[Tensor, float]:
    """Weights and the last ratio, term by term."""
    p = torch.linspace(-1, 1, len(steps[0]), dtype=torch.float64)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    beta1, beta2 = OPTIONS["betas"]
    ratio = math.nan
    for t, grad in enumerate(steps, 1):
        m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2
        root = (v + OPTIONS["eps"]).sqrt() if options.get("eps_inside_sqrt") else v.sqrt() + OPTIONS["eps"]
        u = m / root + options.get("weight_decay", 0.0) * p
        ratio = (p.norm() / u.norm()).item()
        ratio = min(max(ratio, options.get("min_coeff", 0.01)), options.get("max_coeff", 10.0))
        lr = OPTIONS["lr"]
        if options.get("bias_correction", True):
            lr *= math.sqrt(1 - beta2**t) / (1 - beta1**t)
        p = p - lr * ratio * u
    return p, ratio


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "bias_correction": False},
        {"eps_inside_sqrt": True},
        {"max_coeff": 0.3},
        {"min_coeff": 5.0, "weight_decay": 0.01},
    ],
    ids=str,
)
def test_the_formula(options: dict[str, float | bool]) -> None:
    steps = gradients(51)
    weight = nn.Parameter(torch.linspace(-1, 1, 51, dtype=torch.float64))
    optimizer = Lamb([weight], **OPTIONS, **options)
    for grad in steps:
        weight.grad = grad.clone()
        optimizer.step()
    expected, ratio = by_formula(steps, options)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)
    assert optimizer.get_lamb_coeffs() == pytest.approx([ratio])


def test_a_layer_is_a_parameter() -> None:
    """Two parameters whose weights differ by a factor move by lengths that differ by that factor."""
    small, large = nn.Parameter(torch.full((10,), 0.1)), nn.Parameter(torch.full((10,), 1.0))
    optimizer = Lamb([small, large], lr=0.1)
    for p in (small, large):
        p.grad = torch.linspace(1, 2, 10)
    optimizer.step()
    torch.testing.assert_close((small - 0.1) * 10, large - 1.0)


def test_a_weight_of_zero_moves_by_the_direction_alone() -> None:
    """The ratio is 1 then, also where max_coeff is below it, as in DeepSpeed; without a gradient nothing moves."""
    zero, still, nothing = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0))
    optimizer = Lamb([zero, still, nothing], lr=0.5, bias_correction=False, eps=0.0, max_coeff=0.3)
    zero.grad, nothing.grad = torch.ones(3), torch.ones(0)
    optimizer.step()
    direction = (1 - 0.9) / math.sqrt(1 - 0.999)
    torch.testing.assert_close(zero.detach(), torch.full((3,), -0.5 * direction))
    assert torch.equal(still, torch.ones(3))
    assert optimizer.get_lamb_coeffs() == [1.0, 1.0]


def test_resuming_changes_nothing() -> None:
    ends = []
    for resumed in (False, True):
        weight = nn.Parameter(torch.linspace(-1, 1, 20))
        optimizer = Lamb([weight], **OPTIONS)
        for i, grad in enumerate(gradients(20)):
            if resumed and i == 3:
                state = optimizer.state_dict()
                optimizer = Lamb([weight], **OPTIONS)
                optimizer.load_state_dict(state)
            weight.grad = grad.float()
            optimizer.step()
        ends.append(weight.detach().clone())
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    "bad", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}, {"max_coeff": 0.001}, {"amsgrad": True}]
)
def test_bad_options(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Lamb"):
        Lamb([nn.Parameter(torch.ones(1))], **bad)


def test_one_bit_lambs_correction_is_a_schedule_that_the_freeze_does_not_end() -> None:
    """The same bits as without it, at rates that are corrected by hand, before the freeze at step 3 and after it.

    The factor, which knows of the correction too (tests/zero/test_one_bit.py), is held at 1.
    """
    torch.manual_seed(0)
    start, grads = torch.randn(7, 5), torch.randn(9, 7, 5)
    ends, held = [], {"factor_min": 1.0, "factor_max": 1.0}
    for by_hand in (False, True):
        p = nn.Parameter(start.clone())
        optimizer = OneBitLamb([p], lr=1e-2, freeze_step=3, weight_decay=0.1, bias_correction=not by_hand, **held)
        for t, grad in enumerate(grads, 1):
            if by_hand:
                optimizer.param_groups[0]["lr"] = 1e-2 * (math.sqrt(1 - 0.999**t) / (1 - 0.9**t))
            p.grad = grad.clone()
            optimizer.step()
        ends.append(p.detach())
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], start)
