"""Whose call needs each parameter: the module that a unit of ZeRO-3 is gathered for.

That is the module in which the parameter is registered, unless a module around it is gathered whole: a leaf. One gather
a Linear is many small messages; a transformer's block as one is few large ones, and needs its parameters together
anyway. On a GPU, where each gather is some launches and the links want large messages, blocks are leaves by default; on
a CPU the smallest units keep least memory. FSDP2 leaves the choice to its user (`fully_shard` a block); DeepSpeed calls
them leaf modules (deepspeed/utils/z3_leaf_module.py).
"""

from collections import Counter

import torch
from torch import nn

from refimpl.zero.config import ZeroConfig


def leaves(model: nn.Module, config: ZeroConfig, on_gpu: bool) -> set[str]:
    """Paths of the modules to gather whole: by class, class name or end of the path, or because they are fine-grained.

    Fine-grained is DeepSpeed's term: fewer than `module_granularity_threshold` parameters for each module inside. The
    model as a whole is never called so.
    """
    whole_blocks = on_gpu if config.gather_blocks is None else config.gather_blocks
    found = blocks(model) if whole_blocks else set()
    for path, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        named = any(
            leaf is kind or leaf == kind.__name__ or (isinstance(leaf, str) and f".{path}".endswith(f".{leaf}"))
            for leaf in config.leaf_modules
        )
        grain = sum(p.numel() for p in module.parameters()) / len(list(module.modules()))
        if named or (path and 0 < grain < config.module_granularity_threshold and _is_called(module)):
            found.add(path)
    return found


def blocks(model: nn.Module) -> set[str]:
    """Paths of the modules that a ModuleList or Sequential repeats: two or more of one class, of several parts each."""
    found = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(child) for child in module)
            found |= {
                f"{path}.{name}" if path else name
                for name, child in module.named_children()
                if kinds[type(child)] > 1 and any(child.children()) and _is_called(child)
            }
    return found


def owners(model: nn.Module, leaf_paths: set[str]) -> dict[nn.Parameter, str]:
    """The module, by path, whose call needs each parameter.

    That is where it is registered; or the leaf module around it; or, for a shared one, the lowest module around all
    its places. A container that is never called itself (ModuleList) passes its own on to the module around it.
    TypeError for bare parameters, which no call needs, and for those of TorchScript, whose calls torch lets nobody see.
    """
    if isinstance(model, nn.ParameterList):
        raise TypeError("ZeRO-3 gathers parameters around the calls of modules: pass the module, not its parameters")
    modules = dict(model.named_modules(remove_duplicate=False))
    places: dict[nn.Parameter, list[list[str]]] = {}
    for path, module in modules.items():
        steps = path.split(".") if path else []
        end = next((i for i in range(len(steps)) if ".".join(steps[:i]) in leaf_paths), len(steps))
        for p in module.parameters(recurse=False):
            if isinstance(module, torch.jit.ScriptModule):
                raise TypeError(
                    f"ZeRO-3 gathers parameters around calls of modules; {path or 'the model'} is TorchScript, which "
                    "takes no hooks: leave it unscripted, or train with stage 2"
                )
            places.setdefault(p, []).append(steps[:end])
    return {p: _lowest_called(paths, modules) for p, paths in places.items()}


def joined(model: nn.Module, owner: dict[nn.Parameter, str], most: int) -> dict[str, str]:
    """The modules that share a unit: the path of each -> that of the first of them.

    They stand side by side in one module, have no parts of their own, and at most `most` elements together.
    """
    sizes = Counter[str]()
    for p, path in owner.items():
        sizes[path] += p.numel()
    first: dict[str, str] = {}
    run, open_in, elements = "", None, 0  # where the run begins, the module in which it may go on, its length
    for path, module in model.named_modules():
        if path in sizes:
            around, has_parts = path.rpartition(".")[0], any(module.children())
            elements += sizes[path]
            if around != open_in or elements > most or has_parts:
                run, elements = path, sizes[path]
            open_in = None if has_parts else around
            first[path] = run
    return first


def _is_called(module: nn.Module) -> bool:
    """Whether the module has a forward of its own: a ModuleList has none."""
    return type(module).forward is not nn.Module.forward


def _lowest_called(paths: list[list[str]], modules: dict[str, nn.Module]) -> str:
    """The longest common prefix of `paths` at which there is a module with a forward of its own."""
    common = paths[0]
    for path in paths[1:]:
        same = [a == b for a, b in zip(common, path, strict=False)]
        common = common[: same.index(False) if False in same else len(same)]
    while common and not _is_called(modules[".".join(common)]):
        common = common[:-1]
    return ".".join(common)
