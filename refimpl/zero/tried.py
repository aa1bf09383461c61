"""Whether an optimizer that nobody knows may be cut: it is tried on a small matrix, whole and in parts.

    whole    one optimizer over [4, 6]
    parts    one over the first 10 of its 24 elements, another over the other 14, as two ranks have them

They take the same steps. Weights and settings must come out equal but for rounding: an optimizer of rows, columns or
norms (Adafactor, Muon), or with an estimate over all parameters (Prodigy), does not pass. Some act only now and then:
where the gradient has become smaller (AdaNorm), where it stands at right angles to the weights (AdamP), or behind the
first steps (AdaShift, whose gradients wait for nine). What it keeps must be cut too: an element for each of the
parameter's, or one for all. To be told that it may be cut (`allow_untested_optimizer`) is not enough: accelerate and
transformers say so of every optimizer.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn, optim

from refimpl.activation.state import aside

STEPS, SHAPE, CUT = 64, (4, 6), 10
SIZES = 1.0, 0.3, 3.0, 0.1  # of gradients, in turns
Make = Callable[[nn.Parameter], optim.Optimizer]


def what_fails(make: Make, device: torch.device) -> str:
    """What is different on a part, in words; "" for nothing. make: an optimizer over a parameter."""
    begin, *gradients = (value.to(device) for value in drawn())
    given: list[Tensor] = []  # to the whole parameter

    def gradient(p: Tensor) -> Tensor:
        given.append(turned(gradients[len(given)], p) if len(given) % 2 else gradients[len(given)])
        return given[-1]

    def part(at: slice) -> tuple[nn.Parameter, optim.Optimizer]:
        flat = iter(g.view(-1)[at] for g in given)
        return stepped(make, begin.view(-1)[at], lambda _: next(flat))

    where = "by itself"
    try:
        with aside(device):
            whole, optimizer = stepped(make, begin, gradient)
            where = "on a part of a parameter"
            parts = [part(at) for at in (slice(CUT), slice(CUT, None))]
    except Exception as error:  # whatever a class has to say about parameters that are flat
        return f"tried {where} it raises {type(error).__name__}: {error}"
    weights, settings = whole.detach(), numbers(optimizer)
    apart, moved = torch.cat([p.detach() for p, _ in parts]) - weights.view(-1), (weights - begin).abs().max()
    if not moved:
        return f"by itself it changes nothing in {STEPS} steps"
    if not apart.abs().max() <= 1e-3 * moved:
        return f"{where} it computes other weights"
    if kept := uncut(whole, optimizer):
        return f"it keeps {kept}, which cannot be cut"
    others = (item for _, own in parts for item in numbers(own).items())
    return next((f"{where} its {key} is another" for key, x in others if abs(x - settings[key]) > 1e-3 * abs(x)), "")


def drawn() -> list[Tensor]:
    """Weights, and a gradient for each step."""
    draw = torch.Generator().manual_seed(0)
    uneven = torch.arange(1.0, 25.0).view(SHAPE)  # or norms of the parts could be alike
    begin, *gradients = (uneven * torch.randn(SHAPE, generator=draw) for _ in range(STEPS + 1))
    return [begin, *(gradient * SIZES[i % len(SIZES)] for i, gradient in enumerate(gradients))]


def turned(gradient: Tensor, weights: Tensor) -> Tensor:
    """At right angles to each row of the weights."""
    rows: Tensor = weights / weights.norm(dim=1, keepdim=True)  # [4, 6]
    return gradient - (gradient * rows).sum(1, keepdim=True) * rows


def stepped(make: Make, begin: Tensor, gradient: Callable[[Tensor], Tensor]) -> tuple[nn.Parameter, optim.Optimizer]:
    """The parameter, and its optimizer, after steps that are each by the `gradient` of what it is."""
    p = nn.Parameter(begin.clone())
    optimizer = make(p)
    for _ in range(STEPS):
        p.grad = gradient(p.detach()).clone()
        optimizer.step()
    return p, optimizer


def numbers(optimizer: optim.Optimizer) -> dict[str, float]:
    """Those in its group."""
    group = optimizer.param_groups[0].items()
    return {key: float(value) for key, value in group if isinstance(value, float | Tensor)}


def uncut(p: nn.Parameter, optimizer: optim.Optimizer) -> str:
    """A state of p that has neither an element for each of p's nor one for all, in words; "" for none."""
    for key, value in optimizer.state[p].items():
        if isinstance(value, Tensor) and value.shape != p.shape and value.numel() > 1:
            return f"a state {key!r} of shape {tuple(value.shape)} for a parameter of shape {tuple(p.shape)}"
        if not isinstance(value, Tensor | bool | int | float | str | None):
            return f"a {type(value).__name__} as the state {key!r}"
    return ""
