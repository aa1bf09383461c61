"""What an answer keeps alive, wherever it hides it, and whether it wrote where it was asked to.

A formula of this course is a claim about memory, and the result alone does not show it: a copy of the whole model in a
closure, or a shard that is a view of a buffer, trains just as well. `alive` therefore asks Python for every tensor that
this process can reach and counts the memory behind them, each storage once and whole.
"""

import copy
import gc
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from refimpl.comm.group import Group
from refimpl.grading.calls import unwatched
from refimpl.grading.compare import Wrong, require

SLACK = 128  # bytes
TRIES = 30


def alive(apart: Iterable[Tensor] = ()) -> int:
    """Bytes behind all tensors of this process, each storage once, gradients too; less the storages of `apart`."""
    with unwatched():
        found = everywhere()
    for t in apart:
        found.pop(t.untyped_storage()._cdata, None)
    return sum(found.values())


def everywhere() -> dict[int, int]:
    """Every storage that this process can reach -> its bytes."""
    gc.collect()
    kinds = (UntypedStorage, Tensor)
    found: dict[int, int] = {}
    for obj in gc.get_objects():
        if not issubclass(type(obj), kinds):
            continue
        if isinstance(obj, UntypedStorage):
            found[obj._cdata] = obj.nbytes()
        elif obj.layout == torch.strided and obj.device.type != "meta":
            own = [obj, obj.grad] if obj.is_leaf and obj.grad is not None else [obj]
            found |= {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in own}
    return found


class Kept:
    """Bytes that have come to stay since this was made, less those that `group` keeps for its transfers."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.before = alive(group.scratch())

    def judge(self, room: int, what: str, advice: str) -> None:
        """Raise Wrong if more than `room` bytes have; a few numbers more, such as counts, do not matter."""
        if not soon(lambda: self.more() <= room + SLACK):
            raise Wrong(f"{what} keeps {self.more():,} bytes alive, expected {room:,}: {advice}")

    def more(self) -> int:
        return alive(self.group.scratch()) - self.before


def soon(holds: Callable[[], bool]) -> bool:
    """Whether it holds, now or in a moment: a thread of gloo's lets go of the buffer that it has sent a little late."""
    for _ in range(TRIES):
        if holds():
            return True
        time.sleep(0.01)
    return False


def let_go(held: list[Tensor], what: str) -> GradientEdge:
    """Empty a list that alone has one result: Wrong if backward keeps that too. -> where to go backward from.

    `Kept` does not see a result that an autograd.Function saves: the copy that autograd makes of it has no Python.
    """
    edge, memory = get_gradient_edge(held[0]), weakref.ref(held.pop().untyped_storage())
    require(soon(lambda: memory() is None), f"{what} stays alive for backward, which needs nothing of it: save less")
    return edge


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The result with most elements that any operation inside had: what is made and let go again is seen too.

    floating: of those of floating point alone; masks and indices do not count.
    """

    def __init__(self, floating: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.floating = floating
        self.shape: tuple[int, ...] = (0,)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        shapes = [tuple(t.shape) for t in made if t.is_floating_point() or not self.floating]
        self.shape = max([self.shape, *shapes], key=math.prod)
        return result

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory behind the tensors, each storage once and whole."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def own_memory(t: Tensor, what: str, advice: str = "give it memory of its own") -> None:
    """Raise Wrong if more memory stays alive through `t` than its elements take."""
    nbytes, needed = t.untyped_storage().nbytes(), t.numel() * t.element_size()
    require(
        nbytes <= max(needed, 1),
        f"{what} is a view: it keeps {nbytes:,} bytes alive, and its own elements are {needed:,}: {advice}",
    )


@contextmanager
def untouched(**inputs: Any) -> Iterator[None]:
    """Raise Wrong if what happens inside changes an input: a tensor's values, or what a list, set or dict holds."""
    held = {name: copy.copy(value) for name, value in inputs.items() if isinstance(value, list | set | dict)}
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    for name, value in held.items():
        members = value.items() if isinstance(value, dict) else enumerate(value)
        tensors |= {f"{name}[{key!r}]": t for key, t in members if isinstance(t, Tensor)}
    before = {name: t.detach().clone() for name, t in tensors.items()}
    yield
    for name, old in held.items():
        held_now, kind = inputs[name], type(old).__name__
        in_order = len(held_now) == len(old) and all(a is b for a, b in zip(held_now, old, strict=True))
        same = held_now == old if isinstance(old, set) else in_order
        require(same, f"the caller's {kind} `{name}` was changed (its order, or what is in it): work on a copy")
    for name, t in tensors.items():
        now, then = t.detach(), before[name]
        same = now.shape == then.shape and bool(((now == then) | (now.isnan() & then.isnan())).all())
        require(same, f"{name} was changed: it is an input and must keep its values")


@contextmanager
def in_place(**outputs: Tensor | Sequence[Tensor]) -> Iterator[None]:
    """Raise Wrong if what happens inside gives an output other memory: its own was to be written."""
    tensors = {name: value for name, value in outputs.items() if isinstance(value, Tensor)}
    for name, value in outputs.items():
        if not isinstance(value, Tensor):
            tensors |= {f"{name}[{i}]": t for i, t in enumerate(value)}
    places = {name: t.data_ptr() for name, t in tensors.items()}
    yield
    for name, t in tensors.items():
        advice = "write into its own (copy_), of which others may have a view; `.data =` does not"
        require(t.data_ptr() == places[name], f"{name} lies in other memory now: {advice}")
