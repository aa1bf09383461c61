"""A model nobody prepared made expert-parallel: its routers stay, its experts are dealt out and called from afar.

    autoep(model, Axes.of_data(Group.world()).with_experts(ep))

Which modules are experts is not read from a list of models, but tried out on a few rows (`trying.py`). They look like
experts by their name or their class's, and their parameters are one tensor a matrix, each cut in equal parts along
dimension 0, or as many submodules of equal shapes. What stands before and after them is the model's own affair; only
their call is replaced, and there are five kinds:

    routed.py    experts(x, indices, weights)    nearly every mixture of transformers 5
    blocks.py    experts(rows, sizes)            JetMoe, older Granite
    blocks.py    experts(rows in slots)          Llama 4
    looped.py    a block that calls each expert of a list: models as they were published, Switch
    bare.py      a block that indexes its experts' tensors: recognised, and written anew

This rank's experts alone must answer as they did in the whole. A module that looks like experts and is none of these is
refused by name, before anything is changed.

Every rank has to call the model as often as the others: `generate(..., synced_gpus=True)` where texts end apart.
DeepSpeed: AutoEP, deepspeed/module_inject/auto_ep.py, with a preset a model family.
"""

import inspect
import re
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from torch import nn

from refimpl.comm.axes import Axes
from refimpl.comm.first import take_first
from refimpl.comm.group import Group
from refimpl.model.experts import StackedExperts
from refimpl.model.moe import layers
from refimpl.parallel.expert.bare import Bare
from refimpl.parallel.expert.blocks import Slots, Sorted
from refimpl.parallel.expert.dispatch import Dispatch
from refimpl.parallel.expert.exchange import Flat
from refimpl.parallel.expert.looped import Looped
from refimpl.parallel.expert.marks import mark, name_of
from refimpl.parallel.expert.routed import Routed
from refimpl.parallel.expert.swap import expert_parallel, sum_experts
from refimpl.parallel.expert.trying import Found, alike, stands_alone, take_part, undivided, ways

LIKE_EXPERTS = re.compile(r"experts?$|experts?\d*$", re.IGNORECASE)
NONE_OF_THEM = re.compile(r"shared|gate|router|norm|residual", re.IGNORECASE)
KINDS: dict[int, type[Found]] = {1: Slots, 2: Sorted, 3: Routed}  # by how many arguments their forward takes


def autoep(model: nn.Module, axes: Axes) -> nn.Module:
    """Every mixture of `model`, in place: our own (`MoE`), and those of models that know nothing of this.

    Every rank calls it; the replicas' first rank's weights are taken by all. ValueError, with the module's name, for
    experts that cannot be understood or that `axes.expert` does not divide, and for a model that has none.
    """
    if layers(model):
        return expert_parallel(model, axes)
    said: list[str | None] = [None]
    try:
        found = survey(model, axes.expert)
    except ValueError as error:
        said = [str(error)]
    said = axes.replicas.all_gather_object(said[0])
    if any(said):  # all ranks or none
        raise ValueError(next(filter(None, said)))
    take_first((*model.parameters(), *model.buffers()), axes.replicas, "experts")
    for name, experts in found.items():
        deal_out(model.get_submodule(name), experts, axes)
    return model


def survey(model: nn.Module, group: Group) -> dict[str, Found]:
    """The experts that `group` is to share, by the names of the modules whose call is replaced. Changes nothing;
    ValueError as `autoep`.
    """
    found: dict[str, Found] = {}
    inside: list[str] = []
    for name, module in model.named_modules():
        if not looks_so(name, module) or name.startswith(tuple(inside)):
            continue
        try:
            call, experts = understood(model, name, module)
        except ValueError:
            if within(module):
                continue  # only their place, as JetMoe's attention
            raise
        inside.append(f"{name}.")
        if call in found:
            raise ValueError(f"{place(name, module)}: its block has another list of experts; they cannot be dealt out")
        if experts.count % group.size:
            raise ValueError(
                f"{place(name, module)}: {experts.count} experts cannot be dealt out to {group.size} ranks equally"
            )
        experts.each = experts.count // group.size
        experts.first = group.rank * experts.each
        if not experts.holder and not stands_alone(module, experts):
            raise ValueError(f"{place(name, module)}: its experts answer otherwise without those of other ranks")
        found[call] = experts
    if not found:
        raise ValueError(f"{type(model).__name__} has no mixture of experts that could be found")
    return found


def place(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})"


def within(module: nn.Module) -> bool:
    """Whether it is no list of experts, but has something in it that looks like experts."""
    return not alike(module) and any(part and looks_so(part, child) for part, child in module.named_modules())


def looks_so(name: str, module: nn.Module) -> bool:
    """By its name, or else its class's, which may have the family's name in it (GraniteMoeSharedExperts)."""
    last, kind = name.rpartition(".")[2], type(module).__name__
    if NONE_OF_THEM.search(last) or not any(True for _ in module.parameters()):
        return False
    return bool(LIKE_EXPERTS.search(last) or (LIKE_EXPERTS.search(kind) and not NONE_OF_THEM.search(kind)))


def understood(model: nn.Module, name: str, module: nn.Module) -> tuple[str, Found]:
    """(the module whose call is replaced, what is known of these experts after trying them). ValueError if nothing."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    kind = None if uncallable(module) else KINDS.get(len(names))
    takes = f"its forward takes ({', '.join(names)}), and not tokens, indices and weights"
    reason: str | None = "it has no forward" if uncallable(module) else takes if kind is None else undivided(module)
    for call, experts in candidates(name, module, kind, names):
        reason = experts.unlike(model.get_submodule(call))
        if reason is None:
            return call, experts
    raise ValueError(
        f"{place(name, module)}: {reason}: such experts cannot be dealt out; leave expert_parallel off, or write the "
        "mixture with refimpl.model.moe.MoE"
    )


def candidates(name: str, module: nn.Module, kind: type[Found] | None, names: list[str]) -> Iterator[tuple[str, Found]]:
    """(the module whose call would be replaced, what its experts may be)."""
    yield from ((name, experts) for experts in (ways(module, kind, names) if kind is not None else ()))
    block, _, holder = name.rpartition(".")
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and len(listed := alike(module)) > 1:
        yield block, Looped(len(listed), listed=listed, holder=holder)
    elif uncallable(module) and (stacked := [p for p in module.parameters() if p.dim() == 3]):
        yield block, Bare(len(stacked[0]), holder=holder)


def uncallable(module: nn.Module) -> bool:
    """Whether it has no forward of its own, as a list of modules has none."""
    return type(module).forward in (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)


def deal_out(module: nn.Module, experts: Found, axes: Axes) -> None:
    """From now on `module` has this rank's part, and its forward is a collective."""
    holder = experts.experts(module)
    take_part(holder, experts)
    for p in holder.parameters():
        p.data = p.data.clone()
    mark(holder, name_of(axes.expert.size))
    experts.dispatch = Dispatch(axes.expert, Flat(axes.expert), axes.tensor)
    module.__dict__["dealt"] = experts
    module.__class__ = dealt(type(module))  # type: ignore[arg-type]
    # The others' rows are each tensor rank's own, all of them: nothing is to be summed.
    if axes.tensor.size > 1 and isinstance(experts, Routed | Bare):
        module.register_forward_pre_hook(partial(sum_experts, axes.tensor))


@cache
def dealt(kind: type[nn.Module]) -> type[nn.Module]:
    """The class, with a forward that sends rows to their experts."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        experts: Found = self.__dict__["dealt"]
        if experts.holder:
            return experts.answer(kind.forward, self, list(args), **kwargs)
        given = dict(zip(experts.names, args, strict=False)) | kwargs
        return experts.answer(kind.forward, self, [given[name] for name in experts.names])

    return type(f"ExpertParallel{kind.__name__}", (kind,), {"forward": forward, "__module__": kind.__module__})


def expert_portions(model: nn.Module) -> dict[nn.Parameter, tuple[int, int, int, int]]:
    """Of stacked experts: parameter -> (dimension, first, count, total), the part of the whole tensor that is here."""
    found: dict[nn.Parameter, tuple[int, int, int, int]] = {}
    for module in model.modules():
        if isinstance(module, StackedExperts) and len(module) < module.of:
            found |= dict.fromkeys(module.parameters(), (0, module.first, len(module), module.of))
        experts = module.__dict__.get("dealt")
        if isinstance(experts, Found) and not experts.listed:
            for p in experts.experts(module).parameters():
                rows = p.shape[0] // experts.each
                found[p] = (0, experts.first * rows, experts.each * rows, experts.count * rows)
    return found
