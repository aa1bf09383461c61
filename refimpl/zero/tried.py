"""Whether an optimizer that nobody knows may be cut: it is tried on a small matrix, whole and in parts.

    whole    one optimizer over [4, 6]
    parts    one over the first 10 of its 24 elements, another over the other 14, as two ranks have them

They take the same few steps. Weights and settings must come out equal but for rounding: an optimizer of rows, columns
or norms (Adafactor, Muon), or with an estimate over all parameters (Prodigy), does not pass. To be told that it may be
cut (`allow_untested_optimizer`) is not enough: accelerate and transformers say so of every optimizer.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn, optim

STEPS, SHAPE, CUT = 4, (4, 6), 10
Make = Callable[[nn.Parameter], optim.Optimizer]


def what_fails(make: Make, device: torch.device) -> str:
    """What is different on a part, in words; "" for nothing. make: an optimizer over a parameter."""
    draw = torch.Generator().manual_seed(0)
    uneven = torch.arange(1.0, 25.0).view(SHAPE)  # or norms of the parts could be alike
    values = [(uneven * torch.randn(SHAPE, generator=draw)).to(device) for _ in range(STEPS + 1)]
    where = "by itself"
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            weights, settings = stepped(make, values)
            where = "on a part of a parameter"
            parts = [stepped(make, [v.view(-1)[at] for v in values]) for at in (slice(CUT), slice(CUT, None))]
    except Exception as error:  # whatever a class has to say about parameters that are flat
        return f"tried {where} it raises {type(error).__name__}: {error}"
    apart = torch.cat([part for part, _ in parts]) - weights.view(-1)
    if not apart.abs().max() <= 1e-3 * (weights - values[0]).abs().max():
        return f"{where} it computes other weights"
    other = (key for _, own in parts for key, x in own.items() if abs(x - settings[key]) > 1e-3 * abs(x))
    return next((f"{where} its {key} is another" for key in other), "")


def stepped(make: Make, values: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """The weights, and the numbers in the optimizer's group, after steps from the first of `values` by the others."""
    p = nn.Parameter(values[0].clone())
    optimizer = make(p)
    for grad in values[1:]:
        p.grad = grad.clone()
        optimizer.step()
    group = optimizer.param_groups[0].items()
    return p.detach(), {key: float(value) for key, value in group if isinstance(value, float | Tensor)}
