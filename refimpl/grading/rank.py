"""In a rank: load the answer, call its grader, and put whatever goes wrong into the learner's terms."""

import linecache
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from refimpl import launch
from refimpl.comm.group import Group
from refimpl.grading.chapters import import_file
from refimpl.grading.compare import Todo, Wrong
from refimpl.grading.traffic import WatchedGroup
from refimpl.ranks.world import World

Answer = ModuleType
Check = Callable[[Any, WatchedGroup], None]
MEMORY = 4 << 30  # bytes that a rank may hold beyond what it starts with
LONGEST = 160  # characters of an exception's own text
FRAMES = 3  # of the learner's own lines shown for an exception


def case(text: str) -> None:
    """Name what is graded next: the report of a failure shows it, and a hang is timed from here."""
    launch.report(text)


def grade_here(check: Check, path: Path, task: str) -> None:
    """Raise Wrong, or Todo, if the answer in the file does not do what `check` asks of `task`."""
    limit_memory()
    World.__init__ = refuse_ranks  # type: ignore[method-assign]
    try:
        answer = import_file(path, path.stem)
        if not hasattr(answer, task):
            raise Wrong(f"{path.name} has no `{task}`", "Its name and arguments must stay as they were given.")
        check(answer, WatchedGroup(dist.group.WORLD, control=Group(dist.new_group())))
    except Wrong:
        raise
    except NotImplementedError as error:
        raise Todo(f"{error or task} is not written yet") from error
    except BaseException as error:
        raise explained(error, path, task) from error


def explained(error: BaseException, path: Path, task: str) -> Wrong:
    """An exception as the learner should read it: what, in which of the learner's own lines."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    name, text = type(error).__name__, str(error)
    brief = text.partition("\n")[0][:LONGEST]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return Wrong(f"{path.name} line {error.lineno} is not Python: {error.msg}", f"    {(error.text or '').strip()}")
    lines = [line for f in own[-FRAMES:] for line in _frame(path, f)]
    if isinstance(error, SystemExit):
        return Wrong(f"{task} leaves the process (sys.exit): return instead, the grader needs the rank alive", *lines)
    if isinstance(error, ImportError) and not _inside(own):
        return Wrong(f"{path.name} cannot be imported: {text}", *lines)
    if not own:
        return Wrong(f"the grader stopped: {name}: {text}", *_tail(error))
    advice = []
    if isinstance(error, NameError) and error.name:
        advice = [f"Nothing is called `{error.name}` there: is it misspelt, or is its import missing?"]
    where = f"{task} raised" if _inside(own) else f"{path.name} cannot be imported:"
    return Wrong(f"{where} {name}: {brief}".rstrip(": "), *lines, *advice)


def _inside(own: list[traceback.FrameSummary]) -> bool:
    """Whether the learner's code was called, rather than imported."""
    return any(f.name != "<module>" for f in own)


def _frame(path: Path, f: traceback.FrameSummary) -> list[str]:
    return [f"  {path.name}:{f.lineno} in {f.name}", f"      {linecache.getline(str(path), f.lineno or 0).strip()}"]


def _tail(error: BaseException) -> list[str]:
    """The last frames, for an error that the learner's file has no part in: e.g. what it returned was unusable."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    return [f"  {Path(f.filename).name}:{f.lineno}: {f.line}" for f in frames]


def refuse_ranks(self: World, ranks: int = 2, **_: object) -> None:
    """In place of `World.__init__` while grading: an answer runs on ranks, it does not start any."""
    raise RuntimeError(f"this code starts {ranks} more ranks: the grader has already started it on its ranks")


def limit_memory() -> None:
    """Let a runaway allocation fail in this rank, not bring the machine down (Linux, ranks on the CPU)."""
    if sys.platform == "linux" and os.environ.get("REFIMPL_DEVICE", "cpu") == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
