"""A stage's hooks: those on modules stay behind when the model is copied, those in graphs keep nothing alive."""

import weakref
from functools import partial
from typing import Any

import torch


class Hook(partial[Any]):
    """A module's hook that stays behind when the module is copied or pickled: the copy is a plain module.

    A `partial`, because torch.compile would look into a method that calls, and compile it anew for each module.
    """

    def __reduce__(self) -> Any:
        return (no_hook, ())

    @property
    def __name__(self) -> str:
        """What torch.jit.script asks of each hook of a module, to compile it."""
        raise AttributeError("a stage's hooks cannot be compiled by torch.jit: script or trace copy.deepcopy(model)")


def weakly(method: Any, *about: Any) -> Hook:
    """A hook of a graph's: calls method(*about, ...) as long as its object and `about` are there, and holds neither.

    Python's garbage collector does not see what a graph holds, and a model may keep a graph: a tensor in an attribute.
    """
    refs = [weakref.WeakMethod(method), *map(weakref.ref, about)]

    def call(*args: Any) -> Any:
        there, *those = [ref() for ref in refs]
        return None if there is None else there(*those, *args)

    return Hook(call)


def untraced(fn: Any) -> Hook:
    """A hook for a forward that may be compiled: the graph breaks before it, and the compiler does not look inside."""
    return Hook(torch.compiler.disable(fn))  # type: ignore[no-untyped-call]


def no_hook() -> Any:
    return _nothing


def _nothing(*_: Any, **__: Any) -> None:
    """What is left of a hook in a copy."""
