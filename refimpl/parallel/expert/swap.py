"""A model's mixtures made expert-parallel from outside: each rank keeps its part of the experts, and tokens travel.

    axes = Axes.of_data(Group.world()).with_experts(ep)
    expert_parallel(model, axes)

Rank r of the expert group has experts r E/ep to (r+1) E/ep, under the names they have in the whole model. Their
parameters are marked as DeepSpeed's are (`marks.py`); a stage or an engine that is given the model afterwards does the
rest. By hand:

    dense parameters     summed over `axes.replicas`,       divided by N, all replicas
    experts'             summed over `axes.expert_data`,    divided by N too: the tokens of ep ranks came to each

What is equal, whatever ep is: outputs, gradients of tokens and gates to the bit, as each block of rows is multiplied
as it is on one rank. Expert gradients to the bit where one rank has an expert (ep = N) or all have it (ep = 1): both
add ((g0 + g1) + g2) + g3. In between two ranks first add their own, (g0 + g1) + (g2 + g3), which in fp32 is another
number: at most 2^-23 (N - 1) sum |g_i| apart. `exact=True` has the ranks of `expert_data` add one after the other
instead (see `exact.py`).

DeepSpeed: deepspeed/moe/layer.py, moe/experts.py; utils/groups.py.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.comm.axes import Axes
from refimpl.comm.first import take_first
from refimpl.comm.group import Group
from refimpl.model.experts import Experts, StackedExperts
from refimpl.model.moe import MoE, layers
from refimpl.parallel.expert.dispatch import Dispatch
from refimpl.parallel.expert.exact import InOrder
from refimpl.parallel.expert.exchange import Flat, Hierarchical, Way
from refimpl.parallel.expert.marks import mark, name_of
from refimpl.parallel.summed import sum_gradient, sum_gradients


def expert_parallel(
    model: nn.Module,
    axes: Axes,
    *,
    node: int | None = None,
    padded: bool = False,
    cut_experts: bool = False,
    sequence: bool = False,
    exact: bool = False,
) -> nn.Module:
    """Every mixture in `model`, in place. Every rank calls it; the replicas' first rank's weights are taken by all.

    node: ranks a node, for a hierarchical all-to-all. padded: see `dispatch.py`. cut_experts: each expert is a module
    that is itself cut over `axes.tensor`. sequence: tensor ranks have other tokens, not the same ones. exact: see
    above. What was dealt out to as many ranks before, such as a copy of a model, keeps its experts and talks over these
    axes. ValueError for a model without mixtures, for experts that ep does not divide, or that share a parameter with
    what another rank has.
    """
    found = layers(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no mixture of experts: see refimpl.model.moe.mixtures")
    ep = axes.expert.size
    whole = [layer for layer in found if not sharing(layer)]
    check(model, found, whole, ep)
    if whole:
        dealt = {p for layer in found if layer not in whole for p in layer.experts.parameters()}
        take_first((p for p in model.parameters() if p not in dealt), axes.replicas, "experts")
    way: Way = Flat(axes.expert) if node is None else Hierarchical(axes.expert, node)
    alone = Group(None, axes.world.ledger, axes.world.device)
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for layer in found:
        if layer in whole:
            layer.experts = part_of(layer.experts, axes.expert, copies)
            share(layer, axes, cut_experts, sequence)
        mark(layer.experts, name_of(ep))
        layer.mix = Dispatch(axes.expert, way, alone if sequence else axes.tensor, padded, cut_experts)
        if exact:
            layer.mix = InOrder(layer.mix, axes.expert_data)
    return model


def sharing(layer: MoE) -> int:
    """How many ranks the layer's experts were dealt out to; 0 if they were not."""
    way = layer.mix.mix if isinstance(layer.mix, InOrder) else layer.mix
    return way.group.size if isinstance(way, Dispatch) else 0


def check(model: nn.Module, found: list[MoE], whole: list[MoE], ep: int) -> None:
    """ValueError, or TypeError, for experts that cannot be dealt out to `ep` ranks."""
    for layer in found:
        experts = layer.experts
        if layer not in whole and sharing(layer) != ep:
            raise ValueError(
                f"the experts are dealt out to {sharing(layer)} ranks already, not to ep_size {ep}: build a new model"
            )
        if not isinstance(experts, Experts | StackedExperts):
            raise TypeError(f"experts are a {type(experts).__name__}: Experts or StackedExperts can be dealt out")
        if layer in whole and len(experts) % ep:
            raise ValueError(
                f"{len(experts)} experts cannot be dealt out to ep_size {ep} ranks equally: choose a divisor"
            )
    if ep > 1 and whole:
        refuse_shared(model, whole, ep)


def refuse_shared(model: nn.Module, whole: list[MoE], ep: int) -> None:
    """ValueError for a parameter that two ranks would have, and train apart."""
    names = {p: name for name, p in model.named_parameters()}
    rank_of: dict[nn.Parameter, int] = {}
    inside = {module for layer in whole for module in layer.experts.modules()}
    for layer in whole:
        for number, expert in enumerate(layer.experts.children()):  # of stacked ones none: each rank has a slice
            rank = number * ep // len(layer.experts)  # type: ignore[arg-type]
            for p in expert.parameters():
                if rank_of.setdefault(p, rank) != rank:
                    raise ValueError(f"{names[p]} is shared by experts of several ranks: give each its own")
    experts = {p for module in inside for p in module._parameters.values()}
    for module in model.modules():
        if module not in inside and (both := experts.intersection(module._parameters.values()) - {None}):
            raise ValueError(f"{names[both.pop()]} is an expert's, and {type(module).__name__} has it too: part them")  # type: ignore[index]


def part_of(experts: nn.Module, group: Group, copies: dict[nn.Parameter, nn.Parameter]) -> nn.Module:
    """This rank's. Of stacked ones a copy: `copies` has those that were made, so that tied weights stay tied."""
    each = len(experts) // group.size  # type: ignore[arg-type]
    part: nn.Module = experts.part(group.rank * each, (group.rank + 1) * each)  # type: ignore[operator]
    for name, weight in experts._parameters.items():
        mine = part._parameters[name]
        assert weight is not None
        assert mine is not None
        part._parameters[name] = copies.setdefault(weight, mine)
    return part


def mark_again(model: nn.Module) -> None:
    """A copied model's parameters have lost their marks."""
    for layer in layers(model):
        if ep := sharing(layer):
            mark(layer.experts, name_of(ep))


def share(layer: MoE, axes: Axes, cut_experts: bool, sequence: bool) -> None:
    """What is done with the layer's gradients on tensor ranks before they are averaged."""
    if axes.tensor.size > 1 and not cut_experts:
        layer.register_forward_pre_hook(partial(sum_experts, axes.tensor))
    if sequence:
        sum_gradients(layer.gate, list(layer.gate._parameters), axes.tensor)


def sum_experts(tensor: Group, layer: nn.Module, args: Any) -> None:
    """A hook before the forward of a layer, or of its experts, whole on each tensor rank: they see its tokens."""
    dealt = layer.__dict__.get("dealt")  # of `auto.py`
    experts: Any = dealt.experts(layer) if dealt is not None else getattr(layer, "experts", layer)
    for p in experts.parameters():
        sum_gradient(p, tensor, "experts, tensor")


def whole_state_dict(model: nn.Module, group: Group) -> dict[str, Tensor]:
    """The whole model's state dict, on every rank of the expert group; a collective. Sends (ep - 1) parts."""
    whole: dict[str, Tensor] = {}
    names = {f"{name}.experts.".lstrip("."): m for name, m in model.named_modules() if isinstance(m, MoE)}
    for name, tensor in model.state_dict().items():
        prefix = next((prefix for prefix in names if name.startswith(prefix)), None)
        if prefix is None:
            whole[name] = tensor
            continue
        out = [torch.empty_like(tensor) for _ in range(group.size)]
        group.all_gather(out, tensor.contiguous(), tag="state dict")
        experts = names[prefix].experts
        if isinstance(experts, StackedExperts):
            whole[name] = torch.cat(out)
            continue
        number, _, rest = name.removeprefix(prefix).partition(".")
        for rank, part in enumerate(out):
            other = int(number) + (rank - group.rank) * len(experts)  # type: ignore[arg-type]
            whole[f"{prefix}{other}.{rest}"] = part
    return whole


def load_whole_state_dict(model: nn.Module, whole: dict[str, Tensor]) -> None:
    """The inverse: every rank takes its parts. No traffic. KeyError and RuntimeError as of `load_state_dict`."""
    mine = {name: whole[name] for name in model.state_dict()}
    for prefix, layer in model.named_modules():
        if isinstance(layer, MoE) and isinstance(layer.experts, StackedExperts):
            first, count = layer.experts.first, len(layer.experts)
            for name, _ in layer.experts.named_parameters():
                key = f"{prefix}.experts.{name}".lstrip(".")
                mine[key] = whole[key][first : first + count]
    model.load_state_dict(mine)


def rebalance(model: nn.Module, group: Group, rate: float = 1e-3) -> None:
    """Once a step, every rank of `group`, the replicas: all gates' biases, by all ranks' tokens."""
    for layer in layers(model):
        load = getattr(layer.gate, "load", None)
        if load is not None:
            group.all_reduce(load, tag="tokens per expert")
            layer.gate.rebalance(rate)  # type: ignore[operator]
