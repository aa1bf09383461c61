"""Which layers feed which: one forward call of a model, read off autograd's graph.

Every linear layer and embedding gets a mark where its input goes in and one where its output comes out. A mark copies
its tensor, and is a node of the graph that autograd builds anyway; so to walk back from a layer's input until the first
marks is to find the layers that feed it, whatever lies between: norms, rotations, softmax, views.

    near(o)   = {q, k, v}            near(down) = {gate, up}            near(q) = {what was added up so far}

The layer at the end of a residual branch shows in the graph too: its output is added to something that its own input
came from. q is not such a layer, although a bias that is added to scores may have been there before: between q and that
addition lies a product of activations.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Node = Any  # of autograd's graph
Call = Callable[[nn.Module], Any]
MIXES = re.compile(r"mm|softmax|attention|dot|conv", re.IGNORECASE)  # of a node's name: not element by element


class Place(NamedTuple):
    """Where a mark stands."""

    layer: str
    call: int
    leaving: bool


class Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return x.clone()  # not a view: what comes out may be written to

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        return None if ctx.place.leaving else grads[0], None  # derivatives, too, end at the nearest layers


def is_linear(module: nn.Module) -> bool:
    """A linear layer: nn.Linear, Hugging Face's Conv1D. If one's own forward computes more, the rehearsal shows it."""
    return (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and is_bare(module)


def is_embedding(module: nn.Module) -> bool:
    """A plain table."""
    return isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward and is_bare(module)


def is_bare(module: nn.Module) -> bool:
    """No hooks that a swap would lose, nothing inside, no parameter but weight and bias; and these not quantised."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    numbers = all(p.is_floating_point() for p in module._parameters.values() if p is not None)
    return numbers and not any(hooks) and not module._modules and set(module._parameters) <= {"weight", "bias"}


def unlike(module: nn.Module, p: Tensor) -> str:
    """Why a layer that has this matrix is not cut."""
    if not p.is_floating_point():
        return f"of {p.dtype}: what is quantised is not cut"
    return f"of a {type(module).__name__}, which is no plain linear layer or embedding"


@dataclass
class Trace:
    """What one forward call left. Its tensors are part of the graph, which lives as long."""

    layers: dict[str, nn.Module]  # in the order of their first call; those that were called
    entries: dict[str, list[Tensor]] = field(default_factory=dict)  # each call's input
    exits: dict[str, list[Tensor]] = field(default_factory=dict)  # and output
    outputs: list[Tensor] = field(default_factory=list)  # the model's, floating-point

    def near(self, name: str) -> set[str]:
        """The layers that feed this one directly."""
        return {place.layer for place in nearest(x.grad_fn for x in self.entries.get(name, []))}

    def last(self) -> set[str]:
        """The layers that feed the model's outputs directly."""
        return {place.layer for place in nearest(x.grad_fn for x in self.outputs)}

    def residual(self) -> set[str]:
        """The layers whose output is added to what their own input came from."""
        graph = reached((x.grad_fn for x in self.outputs), sources)
        found: set[str] = set()
        before = cache(lambda place: reached([self.entries[place.layer][place.call].grad_fn], sources))
        for node in graph:
            sides = added(node)
            for side, other in (sides, sides[::-1]) if sides else ():
                branch = nearest([side], MIXES)
                linear = [place for place in branch if place.layer in self.entries and place.layer not in found]
                parts = reached([other], added)  # (x + attention(x)) + mlp(x): of what was added up, x was there before
                found |= {place.layer for place in linear if not parts.isdisjoint(before(place))}
        return found


def sources(node: Node) -> list[Node]:
    """What a node is computed from."""
    return [source for source, _ in node.next_functions if source is not None]


def added(node: Node) -> list[Node]:
    """What a node adds up; nothing if it is no sum of two."""
    sides = sources(node)
    return sides if node.name().startswith("AddBackward") and len(sides) == 2 else []


def reached(nodes: Iterable[Node], further: Callable[[Node], list[Node]]) -> set[Node]:
    """These nodes, and all that `further` leads to from one to the next."""
    seen, todo = set[Node](), [node for node in nodes if node is not None]
    while todo:
        if (node := todo.pop()) not in seen:
            seen.add(node)
            todo += further(node)
    return seen


def nearest(nodes: Iterable[Node], stop: re.Pattern[str] | None = None) -> set[Place]:
    """The outputs of layers that these nodes are computed from with no other layer, and no `stop`, between."""

    def up_to_layers(node: Node) -> list[Node]:
        return [] if left(node) or (stop and stop.search(node.name())) else sources(node)

    return {place for node in reached(nodes, up_to_layers) if (place := left(node))}


def left(node: Node) -> Place | None:
    """The layer whose output a node is, if it is one."""
    place = getattr(node, "place", None)
    return place if isinstance(place, Place) and place.leaving else None


def trace(model: nn.Module, call: Call) -> Trace:
    """call(model), with every plain linear layer and embedding marked."""
    found = Trace({})

    def enter(module: nn.Module, args: Any, name: str) -> Any:
        found.layers.setdefault(name, module)
        if isinstance(module, nn.Embedding) or not args:
            return None
        entries = found.entries.setdefault(name, [])
        x = Mark.apply(args[0], Place(name, len(entries), leaving=False))  # type: ignore[no-untyped-call]
        entries.append(x)
        return (x, *args[1:])

    def leave(module: nn.Module, args: Any, out: Any, name: str) -> Any:
        if not isinstance(out, Tensor):  # Llama 4's router gives two, and stays whole
            return out
        exits = found.exits.setdefault(name, [])
        y: Tensor = Mark.apply(out, Place(name, len(exits), leaving=True))  # type: ignore[no-untyped-call]
        exits.append(y)
        return y

    with hooked(plain_layers(model), enter, leave):
        found.outputs = tensors(call(model))
    return found


@contextmanager
def hooked(layers: Mapping[str, nn.Module], enter: Callable[..., Any], leave: Callable[..., Any]) -> Iterator[None]:
    """Within it `enter` and `leave` are hooks before and behind each layer's forward, told its `name`."""
    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(enter, name=name)))
            hooks.enter_context(layer.register_forward_hook(partial(leave, name=name)))
        yield


def plain_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> linear layer or embedding."""
    return {name: module for name, module in model.named_modules() if is_linear(module) or is_embedding(module)}


def tensors(out: Any) -> list[Tensor]:
    """The floating-point tensors of what a model returned: a tensor, or tuples, lists and dictionaries of them."""
    if isinstance(out, Tensor):
        return [out] if out.is_floating_point() else []
    if isinstance(out, Mapping):
        return [x for value in out.values() for x in tensors(value)]
    if isinstance(out, tuple | list):
        return [x for value in out for x in tensors(value)]
    return []
