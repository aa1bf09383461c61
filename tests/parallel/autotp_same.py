"""What the tests of `autotp` share: a model of that name, and whether a cut one computes what the whole one does."""

from typing import Any

import autotp_models as models
import torch
from torch import nn

from refimpl.comm.group import Group
from refimpl.parallel.auto.regions import pattern
from refimpl.parallel.auto.report import Report
from refimpl.parallel.auto.trace import tensors
from refimpl.parallel.tensor import cuts

# 64 roundings, relative to the tensor's norm: a split dot product adds in another order, and only that. What is 0 but
# for rounding (the gradient of a bias that is added to all keys) is measured by the largest gradient.
BOUND = 64 * torch.finfo(torch.float32).eps


def made(name: str, rank: int | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """A model with no bias that is 0, different on each rank, and what it is called with. Rank 0's is taken by all."""
    torch.manual_seed(Group.world().rank if rank is None else rank)
    model: nn.Module = getattr(models, name)()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    if hasattr(model, "config"):
        model.config.use_cache = False
    return model.eval(), dict(getattr(model, "dummy_inputs", None) or models.tokens())


def kinds(report: Report) -> dict[str, str]:
    """Names without their numbers."""
    return {pattern(layer): kind for layer, kind in report.kinds.items()}


def same_numbers(model: nn.Module, whole: nn.Module, example: dict[str, Any], group: Group) -> None:
    """Outputs and gradients, within BOUND."""
    outs, expected = tensors(model(**example)), tensors(whole(**example))
    assert len(outs) == len(expected)
    torch.manual_seed(1)
    weights = [torch.randn_like(y) for y in expected]
    for ys in (outs, expected):
        torch.autograd.backward([sum((y * w).sum() for y, w in zip(ys, weights, strict=True))])
    for y, right in zip(outs, expected, strict=True):
        assert float((y - right).detach().norm()) < BOUND * float(right.detach().norm())
    same_gradients(model, whole, group)


def same_gradients(model: nn.Module, whole: nn.Module, group: Group, bound: float = BOUND) -> None:
    """Of a cut parameter this rank's part; whose parts are the same wherever several ranks have them."""
    parts, plain = cuts(model), dict(whole.named_parameters(remove_duplicate=False))
    largest = max(float(p.grad.norm()) for p in plain.values() if p.grad is not None)
    for name, p in model.named_parameters(remove_duplicate=False):
        right, grad = plain[name].grad, p.grad
        if right is None:
            assert grad is None or not grad.any(), name
            continue
        if p in parts:
            split, dim, _ = parts[p]
            right = split.part(right, group.rank, dim)
            assert split.part(split.gather(p.detach(), group, dim, "test"), group.rank, dim).equal(p.detach()), name
        assert float((grad - right).norm()) < bound * max(float(right.norm()), 1e-2 * largest), name
