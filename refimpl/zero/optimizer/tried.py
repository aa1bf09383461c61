"""Whether an optimizer that nobody knows may be cut: it is tried on two small matrices, whole and in parts.

    whole    one optimizer over both
    parts    one over the first elements of the first, another over its others and the second, as two ranks have them

They take the same steps. Weights and settings must come out equal but for rounding: an optimizer of rows, columns or
norms (Adafactor, Muon), one with an estimate over all parameters (Prodigy), or that goes by a parameter's place in its
group (GrokAdamW), does not pass. Some act only now and then: where the gradient has become smaller (AdaNorm), where it
stands at right angles to the weights (AdamP), behind the first steps (AdaShift, whose gradients wait for nine), beside
small weights (a LAMB whose ratio is at most 1), on matrices of some size (Adafactors that factor from 16, or from 128
on; states of 8 bits, from 4,096 elements on, in blocks of 256). So who passes is tried on larger matrices of small
weights. What it keeps must be cut too: an element for each of the parameter's, or one for all. Who speaks to other
ranks fails at once (Keller Jordan's Muon, where each steps some of the matrices): all ranks try the same here, and have
other parts later. To be told that it may be cut (`allow_untested_optimizer`) is not enough: accelerate and transformers
say so of every one.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from refimpl.activation.state import aside

SIZES = 1.0, 0.3, 3.0, 0.1  # of gradients, in turns
TRIALS = ((4, 6), 10, 64, 1.0), ((132, 192), 7001, 12, 1e-3)  # shape, where it is cut, steps, size of the weights
Make = Callable[[Sequence[nn.Parameter]], optim.Optimizer]
Draw = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # weights -> their gradients


def what_fails(make: Make, device: torch.device) -> str:
    """What is different on a part, in words; "" for nothing. make: an optimizer over parameters."""
    return next((words for trial in TRIALS if (words := fails_at(make, device, *trial))), "")


def fails_at(make: Make, device: torch.device, shape: tuple[int, int], cut: int, steps: int, size: float) -> str:
    """The same of one trial."""
    begin, *gradients = (value.to(device) for value in drawn(shape, steps, size))
    given: list[Tensor] = []  # to the whole parameters

    def gradient(those: Sequence[Tensor]) -> Sequence[Tensor]:
        g = gradients[len(given)]
        given.append(turned(g, torch.stack(list(those))) if len(given) % 2 else g)
        return given[-1].unbind()

    def part(a: int, b: int) -> tuple[list[nn.Parameter], optim.Optimizer]:
        flat = iter(g.view(-1)[a:b] for g in given)
        return stepped(make, [begin.view(-1)[a:b]], lambda _: [next(flat)], steps)

    where = "by itself"
    try:
        with aside(device), Alone():  # type: ignore[no-untyped-call]
            whole, optimizer = stepped(make, begin.unbind(), gradient, steps)
            where = "on a part of a parameter"
            parts = [part(a, b) for a, b in pairwise((0, cut, begin.numel()))]
    except Exception as error:  # whatever a class has to say about parameters that are flat
        return f"tried {where} it raises {type(error).__name__}: {error}"
    weights, settings = torch.stack([p.detach() for p in whole]), numbers(optimizer)
    apart = torch.cat([p.detach() for those, _ in parts for p in those]) - weights.view(-1)
    if not (moved := (weights - begin).abs().max()):
        return f"by itself it changes nothing in {steps} steps"
    if not apart.abs().max() <= 1e-3 * moved:
        return f"{where} it computes other weights"
    if kept := next((words for p in whole if (words := uncut(p, optimizer))), ""):
        return f"it keeps {kept}, which cannot be cut"
    others = (item for _, own in parts for item in numbers(own).items())
    return next((f"{where} its {key} is another" for key, x in others if abs(x - settings[key]) > 1e-3 * abs(x)), "")


class Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """No word with other ranks: one that fails on a part would leave the others waiting for it."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled steps (torchao's) stay compiled: dynamo would note for good that it must leave them alone."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(f"{func}: it communicates by itself")
        return func(*args, **(kwargs or {}))


def drawn(shape: tuple[int, int], steps: int, size: float) -> list[Tensor]:
    """Weights of two matrices, [2, *shape], and gradients for each step."""
    draw = torch.Generator().manual_seed(0)
    uneven = torch.linspace(1.0, 24.0, shape[0] * shape[1]).view(shape)  # or norms of the parts could be alike
    begin, *gradients = (uneven * torch.randn(2, *shape, generator=draw) for _ in range(steps + 1))
    return [size * begin, *(gradient * SIZES[i % len(SIZES)] for i, gradient in enumerate(gradients))]


def turned(gradient: Tensor, weights: Tensor) -> Tensor:
    """At right angles to each row of the weights."""
    rows: Tensor = weights / weights.norm(dim=-1, keepdim=True)  # [2, 4, 6]
    return gradient - (gradient * rows).sum(-1, keepdim=True) * rows


def stepped(
    make: Make, begin: Sequence[Tensor], gradients: Draw, steps: int
) -> tuple[list[nn.Parameter], optim.Optimizer]:
    """The parameters, and their optimizer, after steps that are each by the `gradients` of what they are."""
    params = [nn.Parameter(value.clone()) for value in begin]
    optimizer = make(params)
    for _ in range(steps):
        for p, gradient in zip(params, gradients([p.detach() for p in params]), strict=True):
            p.grad = gradient.clone()
        optimizer.step()
    return params, optimizer


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
