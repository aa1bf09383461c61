"""A module or parameter of a model by its dotted name. DeepSpeed: compression/helper.py."""

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
