"""What an answer may change for the whole process: put back before the next one, and named when it does harm.

Ranks stay warm from one grading to the next. Without this a `torch.set_grad_enabled(False)` in one chapter's file would
fail the right answer to another's.
"""

import os
import random
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from itertools import takewhile
from operator import is_
from typing import Any, ClassVar

import torch
from torch.nn.modules import module as hooks


def _here() -> str:
    """The working folder; none, if an answer went into one that is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


Switch = tuple[Callable[[], Any], Callable[[Any], Any]]
SWITCHES: dict[str, Switch] = {
    "torch.set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_default_device": (torch.get_default_device, torch.set_default_device),
    "torch.set_num_threads": (torch.get_num_threads, torch.set_num_threads),
    "torch.use_deterministic_algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "os.environ": (lambda: dict(os.environ), lambda old: _fill(os.environ, old)),
    "os.chdir": (_here, os.chdir),
}
SEEDS: tuple[Switch, ...] = ((torch.get_rng_state, torch.set_rng_state), (random.getstate, random.setstate))
PATCHED = ("torch", "torch.autograd", "torch.distributed", "torch.nn", "torch.optim", "torch.utils", "refimpl")
UNSEEN = ("__init__", "__call__", "__new__", "__setattr__", "__getattr__")  # of dunder names, those that people patch


def _fill(found: MutableMapping[Any, Any], old: Mapping[Any, Any]) -> None:
    found.clear()
    found.update(old)


class Process:
    """The state of this process as it was when this was made; names as they were when their module was first seen."""

    noted: ClassVar[dict[int, tuple[Any, dict[str, Any]]]] = {}  # id of a module or class -> it, and its names
    modules: ClassVar[set[str]] = set()  # that were looked at

    def __init__(self) -> None:
        self.note()
        self.switches = {name: read() for name, (read, _) in SWITCHES.items()}
        self.seeds = [read() for read, _ in SEEDS]
        self.hooks = {n: dict(v) for n, v in vars(hooks).items() if n.startswith("_global_") and isinstance(v, dict)}

    @classmethod
    def note(cls) -> None:
        """The names of what was imported since the last look. The ranks' server looks first (see `noted.py`)."""
        new = list(takewhile(lambda name: name not in cls.modules, reversed(sys.modules)))  # they are the last
        cls.modules.update(new)
        cls.noted.update((id(place), (place, dict(vars(place)))) for place in _places(new))

    def changed(self) -> list[str]:
        """What an answer has set and left set, by the name of the function that sets it."""
        return [name for name, (read, _) in SWITCHES.items() if read() != self.switches[name]]

    def reset_switches(self) -> None:
        for name in self.changed():
            SWITCHES[name][1](self.switches[name])
        for old, (_, write) in zip(self.seeds, SEEDS, strict=True):
            write(old)

    def reset(self) -> None:
        """All of it: also functions and classes of torch and refimpl that were replaced, and hooks on all modules."""
        self.reset_switches()
        for name, old in self.hooks.items():
            _fill(getattr(hooks, name), old)
        for place, names in self.noted.values():
            _put_back(place, names)


def _places(names: Iterable[str]) -> list[Any]:
    """Of these modules those whose names people replace, and the classes that are defined in them."""
    found: list[Any] = []
    for name in names:
        module = sys.modules[name]
        at_home = name in PATCHED or name.rpartition(".")[0] in PATCHED or name.startswith(("refimpl.", "torch.nn."))
        if module is None or not at_home:
            continue
        found.append(module)
        found += [v for v in list(vars(module).values()) if issubclass(type(v), type) and v.__module__ == name]
    return found


def _put_back(place: Any, names: dict[str, Any]) -> None:
    if len(names) == len(vars(place)) and all(map(is_, names.values(), vars(place).values())):
        return  # most places, and there are 1700
    now = dict(vars(place))
    for name, old in names.items():
        # Only what is called: a number or an object may be a count that the library itself goes on with.
        if now.get(name) is not old and (callable(old) or isinstance(old, property | staticmethod)):
            setattr(place, name, old)
    if isinstance(place, type):
        for name in set(now) - set(names):
            shadows = callable(now[name]) or any(name in vars(base) for base in place.__mro__[1:])
            if shadows and (name in UNSEEN or not name.startswith("__")):
                delattr(place, name)
