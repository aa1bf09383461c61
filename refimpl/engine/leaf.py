"""Modules that ZeRO-3 gathers whole: those flagged, by hand or by zero_optimization.leaf_module.

A flag stays on its module, so that `deepspeed.utils.get_z3_leaf_modules` tells what a configuration has found.
DeepSpeed: deepspeed/utils/z3_leaf_module.py.
"""

import warnings
from collections.abc import Callable, Sequence

from torch import nn

from refimpl.engine.configuration.keys import ConfigWarning
from refimpl.engine.configuration.zero_sections import LeafModule

FLAG = "_z3_leaf"  # DeepSpeed's name for it


def of_classes(model: nn.Module, classes: Sequence[type | str]) -> list[nn.Module]:
    """The modules of these classes, or of classes of these names, with or without their package's."""
    found = []
    for module in model.modules():
        kind = type(module)
        names = (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
        if any(wanted in names if isinstance(wanted, str) else isinstance(module, wanted) for wanted in classes):
            found.append(module)
    return found


def of_paths(
    model: nn.Module, wanted: Sequence[str], fits: Callable[[str, str], bool]
) -> tuple[list[nn.Module], list[str]]:
    """The modules whose path fits one of `wanted`; and those of `wanted` that no path fits."""
    paths = dict(model.named_modules())
    found = [module for path, module in paths.items() if any(fits(path, one) for one in wanted)]
    return found, [one for one in wanted if not any(fits(path, one) for path in paths)]


def flagged(model: nn.Module, asked: LeafModule, rank: int) -> tuple[str, ...]:
    """Flag the modules that the configuration asks for; the paths of all that are flagged.

    Rank 0 warns (`ConfigWarning`) of what the model has not; of classes only if it has none of them.
    """
    classes = of_classes(model, asked.classes)
    named, unnamed = of_paths(model, asked.names, str.__eq__)
    ended, unended = of_paths(model, asked.name_suffixes, str.endswith)
    for module in (*classes, *named, *ended):
        setattr(module, FLAG, True)
    missing = {"classes": [] if classes else asked.classes, "names": unnamed, "name_suffixes": unended}
    for key, values in missing.items():
        if values and rank == 0:
            note = f"zero_optimization.leaf_module.{key} = {values}: the model has no such module"
            warnings.warn(note, ConfigWarning, stacklevel=2)
    return tuple(path for path, module in model.named_modules() if getattr(module, FLAG, False))
