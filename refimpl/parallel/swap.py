"""Layers of a plain model swapped from outside, by a plan: pattern of names -> style, see `styles.py`.

    parallelize(GPT(config), gpt_plan(config.heads, config.vocab), group)

The model knows nothing of it. Names stay, so a part of the state dict has the names of the whole; `whole_state_dict`
joins the parts. Parameters that two layers share are shared by what takes their place. Columns that stand side by side
in one module share their f: see `door.py`. `draws`: see `draws.py`.

Sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2) is the same plan with `sequence=True`:
outside the split layers each rank then holds T/N tokens. f becomes an all-gather of tokens (backward: reduce-scatter),
g a reduce-scatter (backward: all-gather): each all-reduce in two halves, the same bytes. Activations between the split
layers: 1/N.

Megatron-LM builds its model of such layers instead. torch: torch/distributed/tensor/parallel/api.py,
`parallelize_module`. DeepSpeed: deepspeed/module_inject/auto_tp.py.
"""

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from refimpl.comm.axes import neighbours
from refimpl.comm.first import take_first
from refimpl.comm.group import Group
from refimpl.parallel.conjugates import TAG, copy, gather_sum
from refimpl.parallel.door import Door
from refimpl.parallel.draws import Draws
from refimpl.parallel.overlap import coming
from refimpl.parallel.styles import AllTokens, Columns, Plan, Style, Where
from refimpl.parallel.summed import sum_gradients
from refimpl.parallel.tensor import ColumnParallelLinear, Exchange, cuts, local


def parallelize(
    model: nn.Module,
    plan: Plan,
    group: Group,
    *,
    sequence: bool = False,
    draws: Draws | None = None,
    overlap: bool = False,
) -> nn.Module:
    """Swap the layers of `model` in place, and return it. Every rank calls it; rank 0's weights are taken by all.

    `overlap`: with `sequence`, column layers multiply their own tokens while the others' come, see `overlap.py`. Sends,
    once: each parameter and buffer from rank 0. ValueError for a pattern that matches no layer, or a layer that two do.
    """
    if overlap and not sequence:
        raise ValueError("overlap=True: only with sequence=True is there an all-gather before the column layers")
    take_first((*model.parameters(), *model.buffers()), group, TAG)
    swap(model, match(plan, [name for name, _ in model.named_modules() if name]), group, sequence, draws, overlap)
    sum_copies(model)
    return model


def sum_copies(model: nn.Module) -> None:
    """Where several ranks have the same outputs of a column layer: each uses them for its own heads of queries, and has
    a part of their gradient. It is summed over these ranks, 2 n (R-1)/R bytes for n on R of them. A collective."""
    for layer in model.modules():
        if isinstance(layer, ColumnParallelLinear) and (spans := layer.split.copied(layer.group.rank)):
            same, _ = neighbours(layer.group, layer.split.copies)
            where = {name: (dim, spans) for name, (_, dim) in layer.splits.items()}
            sum_gradients(layer, list(layer._parameters), same, where)


def swap(
    model: nn.Module,
    styles: Mapping[str, Style],
    group: Group,
    sequence: bool = False,
    draws: Draws | None = None,
    overlap: bool = False,
) -> list[tuple[nn.Module, str, nn.Module]]:
    """The same with weights that are equal on all ranks, and full names. Sends nothing.

    Returns what it replaced, (module around, name in it, plain layer): a module that is registered under several names
    is replaced under all.
    """
    enter: Exchange = (coming if overlap else gather_sum) if sequence else copy
    given_all = tuple(f"{name}." for name, style in styles.items() if sequence and isinstance(style, AllTokens))
    layers: dict[str, nn.Module] = {}
    kept: dict[nn.Parameter, nn.Parameter] = {}  # a plain parameter -> what takes its place
    for name, style in styles.items():
        plain = model.get_submodule(name)
        where = Where(name, group, sequence, draws, local if name.startswith(given_all) else enter)
        layer = layers[name] = style(plain, where)
        hooks = plain._forward_hooks, plain._forward_pre_hooks, plain._backward_hooks, plain._backward_pre_hooks
        if layer is not plain and any(hooks):
            raise ValueError(f"{name} has hooks, which would see parts of its tensors: register them after the cut")
        for key, p in plain.named_parameters(recurse=False) if layer is not plain else ():
            if p in kept:
                setattr(layer, key, same_part(name, kept[p], getattr(layer, key)))
            else:
                kept[p] = getattr(layer, key)
        layer.train(plain.training)
    for name, module in model.named_modules():
        for key, q in module._parameters.items() if name not in layers else ():
            if q in kept and kept[q] is not q:
                raise ValueError(
                    f"{name}.{key} is shared with a layer that is split: give {name} a place in the plan too"
                )
    replaced = put(model, {model.get_submodule(name): layer for name, layer in layers.items()})
    for around in side_by_side({name: style for name, style in styles.items() if not name.startswith(given_all)}):
        door = Door(enter, model.get_submodule(around))
        for layer in model.get_submodule(around).children():
            if isinstance(layer, ColumnParallelLinear):
                layer.enter = door
    if draws is not None:
        draws.guard(model, [model.get_submodule(name) for name in around_columns(styles)])
    return replaced


def put(model: nn.Module, layers: Mapping[nn.Module, nn.Module]) -> list[tuple[nn.Module, str, nn.Module]]:
    """In place of each plain layer the other, wherever the model has it. Returns where what was."""
    places = [(module, key, child) for module in model.modules() for key, child in module.named_children()]
    replaced = [(module, key, child) for module, key, child in places if layers.get(child, child) is not child]
    for module, key, child in replaced:
        setattr(module, key, layers[child])
    return replaced


def side_by_side(styles: Mapping[str, Style]) -> list[str]:
    """The modules in which two layers or more are cut by columns."""
    around = Counter(name.rpartition(".")[0] for name, style in styles.items() if isinstance(style, Columns))
    return [name for name, columns in around.items() if columns > 1]


def around_columns(styles: Mapping[str, Style]) -> list[str]:
    """Every module below the model in which, at any depth, a layer is cut by columns."""
    columns = [name.split(".") for name, style in styles.items() if isinstance(style, Columns)]
    return sorted({".".join(parts[:depth]) for parts in columns for depth in range(1, len(parts))})


def called(name: str, pattern: str) -> bool:
    """Whether a layer's name fits a pattern: a star stands for one part of a name, or for a piece of it."""
    return fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")


def match(plan: Plan, names: list[str]) -> dict[str, Style]:
    """Each matched layer's name -> its style, in the model's order."""
    found: dict[str, Style] = {}
    for pattern, style in plan.items():
        hits = [name for name in names if called(name, pattern)]
        if not hits:
            raise ValueError(f"plan: no layer is called {pattern!r}; the model's are {', '.join(names[:12])}, ...")
        for name in hits:
            if name in found:
                raise ValueError(f"plan: {name} is matched twice, by {pattern!r} too")
            found[name] = style
    return {name: found[name] for name in names if name in found}


def same_part(name: str, first: nn.Parameter, second: nn.Parameter) -> nn.Parameter:
    """The first, for both layers. ValueError if they are not the same part of the shared whole."""
    if first.shape != second.shape or not torch.equal(first, second):
        raise ValueError(f"{name}: its weight is shared with another layer's, which is split differently")
    return first


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The unsplit model's state dict, on every rank; a collective. Sends (N - 1) parts of every split parameter."""
    return join_parts(model, model.state_dict())


def join_parts(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As `whole_state_dict`, of weights that are given by their names in `model`."""
    parts, whole = cuts(model), dict(state)
    for name, p in model.named_parameters(remove_duplicate=False):
        if p in parts and name in whole:
            split, dim, group = parts[p]
            whole[name] = split.gather(whole[name], group, dim, "state dict")
    return whole


def load_whole_state_dict(model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """The inverse: every rank takes its parts. No traffic. KeyError and RuntimeError as of `load_state_dict`."""
    parts, mine = cuts(model), dict(whole)
    for name, p in model.named_parameters(remove_duplicate=False):
        if p in parts:
            split, dim, group = parts[p]
            mine[name] = split.part(whole[name], group.rank, dim)
    model.load_state_dict(mine)
