"""Ranks that stay: tests run their functions on one living world of each size, instead of starting ranks of their own.

`worlds.run` is `launch.run` on ranks that earlier tests of this process have used. torch's settings and the seeds
(`launch.World`) and the filters of warnings are put back between calls, and nothing else is: a function of ours that a
test leaves patched is an error. After a call that failed, when the environment is another one, and after CALLS calls
the ranks are replaced: they may have made different calls, and hold groups of their own.

A test whose subject is a process (how it starts, what it holds, how it ends, what is patched in it) uses `launch.run`.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from operator import is_
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch

from refimpl.comm.signals import unsupported
from refimpl.launch import World

T = TypeVar("T")
CALLS = 50
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
ZB_V = pytest.mark.skipif(TORCH < (2, 12), reason="torch 2.11's ZB-V sends to its own rank, which gloo refuses")
TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="no triton: its wheels are for Linux")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
NEAR = os.environ.get("REFIMPL_TRANSPORT") or ("gloo" if unsupported() else "shared")  # of ranks on this host
WAYS = {"gloo": "Composed", "shared": "Shared"}  # its class
LARGEST = 4  # ranks; larger worlds are rare, and live for their call only


@dataclass
class Kept:
    world: World
    environment: dict[str, str]  # of the moment it was started in
    calls: int = 0


class Worlds:
    """Living worlds by number of ranks and device."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, str], Kept] = {}

    @contextmanager
    def one(self, ranks: int, device: str) -> Iterator[World]:
        """A world for one call. It is kept for the next if the call succeeds."""
        key = ranks, device if torch.cuda.is_available() else "cpu"
        kept = self.kept.pop(key, None)
        if kept is None or kept.environment != environment():
            if kept:
                kept.world.stop()
            kept = Kept(World(ranks, device=device), environment())
        try:
            yield kept.world
        except BaseException:
            kept.world.stop()
            raise
        kept.calls += 1
        if kept.calls < CALLS and ranks <= LARGEST:
            self.kept[key] = kept
        else:
            kept.world.stop()

    def stop(self) -> None:
        for kept in self.kept.values():
            kept.world.stop()
        self.kept.clear()


def environment() -> dict[str, str]:
    """What ranks that start now would see, less what pytest changes for each test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@cache
def worlds() -> Worlds:
    """This process's worlds; tests/conftest.py stops them when the session ends."""
    return Worlds()


def run(fn: Callable[..., T], *args: Any, ranks: int = 2, timeout: float | None = 60, device: str = "auto") -> list[T]:
    """fn(*args) on `ranks` living ranks; see `launch.run`."""
    with worlds().one(ranks, device) as world:
        return world.call(undisturbed, fn, *args, timeout=timeout)


def undisturbed(fn: Callable[..., T], *args: Any) -> T:
    """In a rank: fn(*args), whose `warnings.simplefilter` ends with it. RuntimeError for what it leaves patched."""
    with warnings.catch_warnings():
        value = fn(*args)
    left = []
    for name, module in ours():
        before, now = NAMES.get(name, {}), vars(module)
        if not same(before, now):
            left += [f"{name}.{n}" for n, was in before.items() if callable(was) and now.get(n) is not was]
            NAMES[name] = dict(now)
    if left:
        raise RuntimeError(f"{fn.__qualname__} leaves {', '.join(left)} patched: put it back, or use launch.run")
    return value


def same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether what was there is there, in its place, and no more: a quick look, at some 20,000 names a call."""
    return len(before) == len(now) and all(map(is_, before.values(), now.values()))


def ours() -> list[tuple[str, ModuleType]]:
    return [(name, module) for name, module in sys.modules.items() if name.startswith("refimpl")]


NAMES = {name: dict(vars(module)) for name, module in ours()}  # in a rank: as the call before left them
