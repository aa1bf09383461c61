"""Modules that ZeRO-3 gathers whole, without hooks on their children: flags that `initialize` reads and sets.

For a mixture of experts, whose experts are used in another order each time, and for fine-grained modules.
DeepSpeed: deepspeed/utils/z3_leaf_module.py; ours: refimpl/engine/leaf.py.
"""

from collections.abc import Callable, Sequence

from torch import nn

from refimpl.engine.leaf import FLAG, of_classes, of_paths


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module is flagged."""
    return bool(getattr(model, FLAG, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All flagged modules in `model`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Flag this module, or take the flag away."""
    setattr(model, FLAG, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Flag the modules of these classes (or class names); them. ValueError if there are none."""
    return _flag(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the flag from the modules of these classes (or class names); them. ValueError if there are none."""
    return _flag(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Flag modules by their path in `model`; them, and the paths that there are none for (ValueError)."""
    return _by_path(model, module_names, flag, raise_if_not_found, str.__eq__)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Flag modules by the end of their path; them, and the ends that there are none for (ValueError)."""
    return _by_path(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def _flag(model: nn.Module, classes: Sequence[type | str], flag: bool, must_find: bool) -> list[nn.Module]:
    if not all(isinstance(wanted, type | str) for wanted in classes):
        raise TypeError(f"leaf_module_classes: classes or their names, not {classes!r}")
    found = of_classes(model, classes)
    if not found and must_find:
        raise ValueError(f"leaf_module_classes = {classes!r}: the model has no such module")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _by_path(
    model: nn.Module, wanted: Sequence[str], flag: bool, must_find: bool, fits: Callable[[str, str], bool]
) -> tuple[list[nn.Module], list[str]]:
    found, missing = of_paths(model, wanted, fits)
    if missing and must_find:
        raise ValueError(f"leaf modules {missing!r}: the model has no such paths")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing
