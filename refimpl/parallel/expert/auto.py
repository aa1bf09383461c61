"""A model nobody prepared made expert-parallel: its routers stay, its experts are dealt out and called from afar.

    autoep(model, Axes.of_data(Group.world()).with_experts(ep))

In transformers 5 nearly every mixture ends in one call, experts(x [T, M], indices [T, k], weights [T, k]) -> [T, M].
What is before it, and what is made of router logits, is the model's own affair. Only that call is replaced: rows go to
the ranks of their experts (`dispatch.py`), the module's own forward answers each with weight 1, and the answers are
weighted and added where the token is. Which modules have such a call is not read from a list of names, but tried out:

    experts     one tensor a matrix, each cut in equal parts along dimension 0; or as many submodules of equal shapes
    asked       its forward has three arguments, and for some width of its tensors gives back what it was given
    sums        experts(x, i, w) = sum over j of w_j experts(x, i_j, 1): what is sent can be weighted afterwards
    parts       this rank's experts alone answer as they did in the whole

on a few random rows, within 64 roundings of the weights' dtype. Outputs then differ from the whole model's by the order
of k additions a token, and by what a matrix product with other rows beside it rounds otherwise. A module that looks
like experts and does not pass is refused by name, before anything is changed.

Every rank has to call the model as often as the others: `generate(..., synced_gpus=True)` where texts end apart.
DeepSpeed: AutoEP, deepspeed/module_inject/auto_ep.py, with a preset a model family.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.comm.axes import Axes
from refimpl.comm.group import Group
from refimpl.model.experts import StackedExperts
from refimpl.model.moe import layers
from refimpl.model.routes import Routes
from refimpl.parallel.expert.dispatch import Dispatch
from refimpl.parallel.expert.exchange import Flat
from refimpl.parallel.expert.marks import mark, name_of
from refimpl.parallel.expert.swap import expert_parallel, sum_experts

ROUNDINGS = 64
LIKE_EXPERTS = re.compile(r"experts?$|experts?\d*$", re.IGNORECASE)
NONE_OF_THEM = re.compile(r"shared|gate|router|norm|residual", re.IGNORECASE)


@dataclass
class Found:
    """Experts that can be dealt out. Not copied with a model: copies talk to the same ranks."""

    count: int
    counters: list[tuple[nn.Module, str]]  # attributes that say how many there are
    listed: list[str]  # names of submodules, one an expert; none where they are stacked
    dispatch: Dispatch | None = None
    width: int = 0  # of a row
    first: int = 0  # this rank's are first .. first + each
    each: int = 0

    def __deepcopy__(self, memo: object) -> "Found":
        return self


class Elsewhere(nn.Module):
    """In the place of an expert that another rank has."""


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
    for tensor in (*model.parameters(), *model.buffers()):
        axes.replicas.broadcast(tensor.data, tag="experts")
    for name, experts in found.items():
        deal_out(model.get_submodule(name), experts, axes)
    return model


def survey(model: nn.Module, group: Group) -> dict[str, Found]:
    """The experts that `group` is to share, by the names of their modules. Changes nothing; ValueError as `autoep`."""
    found = {name: understood(name, module) for name, module in candidates(model)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no mixture of experts that could be found")
    for name, experts in found.items():
        where = f"{name} ({type(model.get_submodule(name)).__name__})"
        if experts.count % group.size:
            raise ValueError(f"{where}: {experts.count} experts cannot be dealt out to {group.size} ranks equally")
        experts.each = experts.count // group.size
        experts.first = group.rank * experts.each
        if not stands_alone(model.get_submodule(name), experts):
            raise ValueError(f"{where}: its experts answer otherwise without those of other ranks")
    return found


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that look like experts, by their name or their class's, and what is not inside another one."""
    inside: list[str] = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        looks = LIKE_EXPERTS.search(last) or LIKE_EXPERTS.search(type(module).__name__)
        if not looks or NONE_OF_THEM.search(last) or NONE_OF_THEM.search(type(module).__name__):
            continue
        if not name.startswith(tuple(inside)) and any(True for _ in module.parameters()):
            inside.append(f"{name}.")
            yield name, module


def understood(name: str, module: nn.Module) -> Found:
    """What is known of these experts after trying them. ValueError with the name if they are of another kind."""
    where = f"{name} ({type(module).__name__})"
    arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if len(arguments) != 3 or type(module).forward is nn.Module.forward:
        said = ", ".join(p.name for p in arguments)
        raise ValueError(
            f"{where}: its forward takes ({said}), and not tokens, indices and weights: such experts cannot be dealt "
            "out; leave expert_parallel off, or write the mixture with refimpl.model.moe.MoE"
        )
    reasons = [f"{where}: no number of experts fits its tensors"]
    for experts in ways(module):
        experts.width = width_of(module)
        if not experts.width:
            reasons.append(f"{where}: no rows of any of its widths come back from its forward in the same shape")
        elif not adds_up(module, experts):
            reasons.append(f"{where}: it does not answer with the weighted sum of its experts' answers")
        else:
            return experts
    raise ValueError(f"{reasons[-1]}; it cannot be dealt out")


def ways(module: nn.Module) -> Iterator[Found]:
    """How many experts there may be, and where they are."""
    shapes = {name: [tuple(p.shape) for p in child.parameters()] for name, child in module.named_children()}
    listed = [name for name, shape in shapes.items() if shape]
    direct = any(True for _ in module.parameters(recurse=False))
    if not direct and len(listed) > 1 and all(shapes[name] == shapes[listed[0]] for name in listed):
        yield Found(len(listed), [], listed)
    counters = [(part, key) for part in module.modules() for key, value in vars(part).items() if number(key, value)]
    for count in dict.fromkeys(vars(part)[key] for part, key in counters):
        if count > 1 and all(p.dim() > 0 and p.shape[0] % count == 0 for p in module.parameters()):
            yield Found(count, [(part, key) for part, key in counters if vars(part)[key] == count], [])


def number(key: str, value: object) -> bool:
    return "expert" in key and isinstance(value, int) and not isinstance(value, bool)


def ask(forward: Callable[..., Any], module: nn.Module, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """The module's own answer. indices, weights: [T, k]."""
    answer: Tensor = forward(module, x, indices, weights)
    return answer


@torch.no_grad()
def width_of(module: nn.Module) -> int:
    """The width of its rows: the first of its tensors' for which as many numbers come back; or 0."""
    like = next(module.parameters())
    for width in dict.fromkeys(n for p in module.parameters() for n in reversed(p.shape)):
        x = like.new_zeros(2, width)
        try:
            answer = ask(type(module).forward, module, x, *chosen(like, [[0], [1]]))
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue
        if isinstance(answer, Tensor) and answer.numel() == x.numel():
            return width
    return 0


def chosen(like: Tensor, indices: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(indices [T, k], as many weights of 1)."""
    index = torch.tensor(indices, device=like.device)
    return index, like.new_ones(index.shape)


def rows(like: Tensor, count: int, width: int) -> Tensor:
    """Numbers that are neither alike nor drawn: the random state stays what it is."""
    grid = torch.arange(count * width, device=like.device, dtype=torch.float32)
    return (grid * 0.7).sin().view(count, width).to(like.dtype)


@torch.no_grad()
def adds_up(module: nn.Module, experts: Found) -> bool:
    """Whether two routes of a token give the weighted sum of what each gives."""
    like, last = next(module.parameters()), experts.count - 1
    training, forward = module.training, type(module).forward
    module.eval()
    x = rows(like, 3, experts.width)
    indices, ones = chosen(like, [[0, last], [last, 0], [last // 2, last]])
    weights = rows(like, 3, 2).abs() + 0.25
    together = ask(forward, module, x, indices, weights).view_as(x)
    each = [ask(forward, module, x, indices[:, [j]], ones[:, [j]]).view_as(x) * weights[:, [j]] for j in range(2)]
    module.train(training)
    return close(together, each[0] + each[1])


def close(found: Tensor, expected: Tensor) -> bool:
    bound = ROUNDINGS * torch.finfo(expected.dtype).eps * expected.double().norm()
    return bool((found.double() - expected.double()).norm() <= bound)


@torch.no_grad()
def stands_alone(module: nn.Module, experts: Found) -> bool:
    """Whether this rank's experts answer alone as they do in the whole."""
    like, forward, training = next(module.parameters()), type(module).forward, module.training
    mine = [[experts.first + i] for i in range(experts.each)]
    module.eval()
    x = rows(like, experts.each, experts.width)
    indices, ones = chosen(like, mine)
    before = ask(forward, module, x, indices, ones).view_as(x)
    others, whole = dict(module._modules), {p: p.data for p in module.parameters()}
    take_part(module, experts)
    answer = ask(forward, module, x, indices - shift(experts), ones).view_as(x)
    module._modules.update(others)
    for p, data in whole.items():
        p.data = data
    for part, key in experts.counters:
        setattr(part, key, experts.count)
    module.train(training)
    return close(answer, before)


def take_part(module: nn.Module, experts: Found) -> None:
    """Other ranks' experts are gone; this rank's are parts of the whole tensors."""
    mine = range(experts.first, experts.first + experts.each)
    if experts.listed:
        module._modules.update({place: Elsewhere() for i, place in enumerate(experts.listed) if i not in mine})
        return
    for p in module.parameters():
        rows = p.shape[0] // experts.count
        p.data = p.data[experts.first * rows :][: experts.each * rows]
    for part, key in experts.counters:
        setattr(part, key, experts.each)


def deal_out(module: nn.Module, experts: Found, axes: Axes) -> None:
    """From now on `module` has this rank's part, and its forward is a collective."""
    take_part(module, experts)
    for p in module.parameters():
        p.data = p.data.clone()
    mark(module, name_of(axes.expert.size))
    experts.dispatch = Dispatch(axes.expert, Flat(axes.expert), axes.tensor)
    module.__dict__["dealt"] = experts
    module.__class__ = dealt(type(module))  # type: ignore[arg-type]
    if axes.tensor.size > 1:
        module.register_forward_pre_hook(partial(sum_experts, axes.tensor))


def shift(experts: Found) -> int:
    """What is taken from an expert's number for the module's own: stacked ones are counted from 0 on every rank."""
    return 0 if experts.listed else experts.first


@cache
def dealt(kind: type[nn.Module]) -> type[nn.Module]:
    """The class, with a forward that sends tokens to their experts."""
    names = list(inspect.signature(kind.forward).parameters)[1:]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(names, args, strict=False)) | kwargs
        x, indices, weights = (given[name] for name in names)
        experts: Found = self.__dict__["dealt"]
        assert experts.dispatch is not None
        flat, k = x.reshape(-1, x.shape[-1]), indices.shape[-1]
        routes = Routes.given(indices.reshape(-1, k), weights.reshape(-1, k), experts.count)
        many = partial(answers, kind.forward, self, experts)
        return experts.dispatch(many, flat, routes).view_as(x)

    return type(f"ExpertParallel{kind.__name__}", (kind,), {"forward": forward, "__module__": kind.__module__})


def answers(
    forward: Callable[..., Any], module: nn.Module, experts: Found, x: Tensor, sizes: Sequence[Sequence[int]]
) -> Tensor:
    """Rows [R, M], by (source, expert) -> their experts' answers, by the module's own forward.

    An expert without rows gets one of zeros, whose answer nobody reads: its gradient is zeros then, and not None, and
    backward comes past here on every rank.
    """
    each = len(sizes[0])
    number = torch.tensor([e for row in sizes for e, n in enumerate(row) for _ in range(n)], dtype=torch.int64)
    idle = [e for e in range(each) if not any(row[e] for row in sizes)]
    number = torch.cat([number, torch.tensor(idle, dtype=torch.int64)]).to(x.device)
    padded = torch.cat([x, x.new_zeros(len(idle), x.shape[1])]) if idle else x
    index = (number + experts.first - shift(experts))[:, None]
    answer = ask(forward, module, padded, index, padded.new_ones(len(padded), 1)).reshape_as(padded)
    return answer[: len(x)]


def expert_portions(model: nn.Module) -> dict[nn.Parameter, tuple[int, int, int, int]]:
    """Of stacked experts: parameter -> (dimension, first, count, total), the part of the whole tensor that is here."""
    found: dict[nn.Parameter, tuple[int, int, int, int]] = {}
    for module in model.modules():
        if isinstance(module, StackedExperts) and len(module) < module.of:
            found |= dict.fromkeys(module.parameters(), (0, module.first, len(module), module.of))
        experts = module.__dict__.get("dealt")
        if isinstance(experts, Found) and not experts.listed:
            for p in module.parameters():
                rows = p.shape[0] // experts.each
                found[p] = (0, experts.first * rows, experts.each * rows, experts.count * rows)
    return found
