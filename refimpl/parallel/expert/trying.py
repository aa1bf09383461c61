"""Experts of a module that nobody described: how many there are, and whether some of them answer without the others.

What a module does is not read from its name, but tried out on a few rows, within 64 roundings of its weights' dtype.
`Found` is what is then known of stacked experts, or of listed ones; a kind of call (`routed.py`, `blocks.py`,
`looped.py`) adds how its module is asked. A trial draws no random number and leaves everything as it was.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.parallel.expert.dispatch import Dispatch

ROUNDINGS = 64
# Of a module that is asked for something else.
REFUSALS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
Forward = Callable[..., Any]


@dataclass
class Found:
    """Experts that can be dealt out. Not copied with a model: copies talk to the same ranks."""

    count: int
    counters: list[tuple[nn.Module, str]] = field(default_factory=list)  # attributes that say how many there are
    listed: list[str] = field(default_factory=list)  # names of submodules, one an expert; none where they are stacked
    names: list[str] = field(default_factory=list)  # of its forward's arguments
    dispatch: Dispatch | None = None
    width: int = 0  # of a row
    first: int = 0  # this rank's are first .. first + each
    each: int = 0
    holder: str = ""  # the module of the experts, in the one whose call is replaced; "": that one itself

    def __deepcopy__(self, memo: object) -> "Found":
        return self

    def unlike(self, module: nn.Module) -> str | None:
        """Why the module's experts cannot be asked so; None if they can. Sets `width`."""
        raise NotImplementedError

    def experts(self, module: nn.Module) -> nn.Module:
        return module.get_submodule(self.holder)

    def sample(self, module: nn.Module, cut: bool) -> Tensor:
        """What this rank's experts answer to some rows; `cut`: the module has no others."""
        raise NotImplementedError

    def answer(self, forward: Forward, module: nn.Module, given: list[Any]) -> Tensor:
        """The module's forward, by all ranks together. given: its arguments."""
        raise NotImplementedError

    def over_ranks(self) -> Dispatch:
        assert self.dispatch is not None
        return self.dispatch

    @property
    def shift(self) -> int:
        """What is taken from an expert's number for the module's own: stacked ones are counted from 0 on all ranks."""
        return 0 if self.listed else self.first


def ways(module: nn.Module, kind: type[Found], names: list[str]) -> Iterator[Found]:
    """How many experts there may be, and where they are."""
    direct = any(True for _ in module.parameters(recurse=False))
    if not direct and len(listed := alike(module)) > 1:
        yield kind(len(listed), [], listed, names)
    for count, counters in counted(module).items():
        if all(divides(count, p) for p in module.parameters()):
            yield kind(count, counters, [], names)


def undivided(module: nn.Module) -> str:
    """Why there is no way."""
    for count in counted(module):
        for name, p in module.named_parameters():
            if not divides(count, p):
                return f"{name} {tuple(p.shape)} is not one part for each of {count} experts"
    return "its experts are neither submodules of equal shapes nor counted by an attribute"


def counted(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """How many experts it may have, with the attributes that say so."""
    found: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for part in module.modules():
        for key, value in vars(part).items():
            if number(key, value) and value > 1:
                found[value].append((part, key))
    return found


def divides(count: int, p: Tensor) -> bool:
    return p.dim() > 0 and p.shape[0] % count == 0


def alike(module: nn.Module) -> list[str]:
    """The names of its submodules that have parameters, if they all have the same shapes; else none."""
    shapes = {name: [tuple(p.shape) for p in child.parameters()] for name, child in module.named_children()}
    listed = [name for name, shape in shapes.items() if shape]
    return listed if all(shapes[name] == shapes[listed[0]] for name in listed) else []


def number(key: str, value: object) -> bool:
    return "expert" in key and isinstance(value, int) and not isinstance(value, bool)


def widths(module: nn.Module) -> list[int]:
    """What may be the width of a row."""
    return list(dict.fromkeys(n for p in module.parameters() for n in reversed(p.shape)))


def rows(like: Tensor, count: int, width: int) -> Tensor:
    """Numbers that are neither alike nor drawn: the random state stays what it is."""
    grid = torch.arange(count * width, device=like.device, dtype=torch.float32)
    return (grid * 0.7).sin().view(count, width).to(like.dtype)


def close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    bound = ROUNDINGS * torch.finfo(expected.dtype).eps * expected.double().norm()
    return bool((found.double() - expected.double()).norm() <= bound)


@contextmanager
def kept_modes(module: nn.Module) -> Iterator[None]:
    """After it every part is in its mode again, in training or not, whatever came."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def trial(module: nn.Module) -> Iterator[None]:
    """Within it no gradients, and nothing that is drawn in training."""
    with kept_modes(module), torch.no_grad():
        module.eval()
        yield


def stands_alone(module: nn.Module, experts: Found) -> bool:
    """Whether this rank's experts answer alone as they do in the whole."""
    with trial(module):
        before = experts.sample(module, cut=False)
        others, whole = dict(module._modules), {p: p.data for p in module.parameters()}
        take_part(module, experts)
        try:
            answer = experts.sample(module, cut=True)
        except REFUSALS:
            return False
        finally:
            module._modules.update(others)
            for p, data in whole.items():
                p.data = data
            for part, key in experts.counters:
                setattr(part, key, experts.count)
    return close(answer, before)


class Elsewhere(nn.Module):
    """In the place of an expert that another rank has."""


def take_part(module: nn.Module, experts: Found) -> None:
    """Other ranks' experts are gone; this rank's are parts of the whole tensors."""
    mine = range(experts.first, experts.first + experts.each)
    if experts.listed:
        gone = [place for i, place in enumerate(experts.listed) if i not in mine]
        module._modules.update({place: Elsewhere().train(module.training) for place in gone})
        return
    for p in module.parameters():
        rows = p.shape[0] // experts.count
        p.data = p.data[experts.first * rows :][: experts.each * rows]
    for part, key in experts.counters:
        setattr(part, key, experts.each)
