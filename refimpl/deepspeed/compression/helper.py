"""A module or parameter of a model by its dotted name; GPT-2's Conv1D as Linear. DeepSpeed: compression/helper.py."""

from operator import attrgetter
from typing import Any

from torch import nn


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """What stands at "layers.0.weight", say. AttributeError if nothing does."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Put `module` where that name says. AttributeError if what it would be in does not exist."""
    parent, _, name = module_name.rpartition(".")
    setattr(attrgetter(parent)(model) if parent else model, name, module)


def unwrapped(model: nn.Module) -> nn.Module:
    """An engine's model; another one itself; without what torch.compile has put around it."""
    module = getattr(model, "module", model)
    return getattr(module, "_orig_mod", module) if isinstance(module, nn.Module) else model


def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Put a Linear [out, in] in the place of every `convert_type`, which keeps its weight as [in, out]; in place."""
    inner, made = unwrapped(model), dict[nn.Module, nn.Linear]()
    for name, old in list(inner.named_modules(remove_duplicate=False)):
        if isinstance(old, convert_type):
            made[old] = made.get(old) or _linear(old)  # one at two places stays one
            recursive_setattr(inner, name, made[old])
    return model


def _linear(old: Any) -> nn.Linear:
    inputs, outputs = old.weight.shape
    bias = getattr(old, "bias", None)
    new = nn.Linear(inputs, outputs, bias=bias is not None, device=old.weight.device, dtype=old.weight.dtype)
    new.weight = nn.Parameter(old.weight.detach().t().contiguous(), old.weight.requires_grad)
    if bias is not None:
        new.bias = nn.Parameter(bias.detach().view(-1), bias.requires_grad)
    return new.train(old.training)
