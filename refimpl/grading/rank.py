"""In a rank: load the answer, call its grader, and put whatever goes wrong into the learner's terms."""

import ast
import bdb
import gc
import linecache
import os
import re
import resource
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from refimpl import launch
from refimpl.comm.group import Group
from refimpl.grading.calls import Calls
from refimpl.grading.chapters import import_file, is_stub, parsed
from refimpl.grading.compare import WORK, Todo, Wrong, WrongFile
from refimpl.grading.kernels import interpret
from refimpl.grading.process import Process
from refimpl.grading.traffic import WatchedGroup
from refimpl.ranks.world import World

Answer = ModuleType
Check = Callable[[Any, WatchedGroup], None]
ALIVE = None  # a report that says no more than that the clock may start anew
MEMORY = 4 << 30  # bytes of private memory that a rank may have, with the 0.2 (torch for CUDA: 0.8) GB it starts with
LONGEST = 160  # characters of an exception's own text
FREED = "out of bounds for storage of size 0"  # torch's words for a view of memory that was resized to 0
SHORT = re.compile(r"storage size of (\d+) are out of bounds for storage of size (\d+)")
NO_TRITON = (
    "Its wheels are for Linux: pip install 'triton>=3.6,<3.8'. No GPU is needed.",
    "On macOS or Windows run the course in a Linux container, in WSL, or on a hosted notebook.",
)
NO_KEYBOARD = "asks for the keyboard (breakpoint, input), which a rank has not got: print, and the report shows it"
NO_MEMORY = "a parameter is used while it has no memory: gather its unit before each forward and each backward"
REFUSED = {  # words of a refusal -> what they mean to who has not read torch's, or the group's, source
    "argsort() takes from 1 to 0 positional arguments": [
        "Beside stable=, torch wants the dimension by its name: x.argsort(dim=1, descending=True, stable=True)."
    ],
    "ranks cannot share equally: give splits": [
        "Rows are along the first dimension, and each rank gets as many: is x cut into a chunk a rank, all as long, "
        "and do the ranks come first? Splits are for what is uneven by its nature."
    ],
    "Expected dtype ['fp32', 'fp64'] but got": ["Make values fp32 where they are loaded: tl.load(...).to(tl.float32)."],
    "and the splits are": [
        "in_splits: how many rows of x go to each rank; out_splits: how many rows of out come from each. N numbers, "
        "which add up to all rows."
    ],
}
FRAMES = 3  # of the learner's own lines shown for an exception


def case(text: str) -> None:
    """Name what is graded next: the report of a failure shows it, and a hang is timed from here."""
    launch.report(text)


def grade_here(check: Check, path: Path, task: str) -> None:
    """Raise Wrong, or Todo, if the answer in the file does not do what `check` asks of `task`."""
    limit_memory()
    if re.search(r"^(import|from) triton", path.read_text(), re.MULTILINE):
        interpret()
    # What `torch.empty` makes is NaN, not by chance the zeros that a padding must be.
    torch.use_deterministic_algorithms(True, warn_only=True)
    World.__init__ = refuse_ranks  # type: ignore[method-assign]
    gc.collect()
    gc.freeze()  # what was there before costs `memory.alive` no time
    process, calls = Process(), Calls(path)
    try:
        with calls.watched():
            answer = import_file(path, path.stem)
        launch.report(ALIVE)  # importing takes a while
        process.reset_switches()  # set while the file was read, e.g. by set_grad_enabled(False): not for the grader
        if not hasattr(answer, task):
            raise Wrong(f"{path.name} has no `{task}`", "Its name and arguments must stay as they were given.")
        calls.inherited(getattr(answer, task))
        with calls.watched():
            check(answer, WatchedGroup(dist.group.WORLD, control=Group(dist.new_group())))
    except Wrong as wrong:
        raise Wrong(wrong.headline, *wrong.details, *left_set(process)) from wrong
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]  # torch raises NotImplementedError too
        if type(error) is NotImplementedError and last.filename == str(path) and str(last.line).startswith("raise"):
            raise still_to_write(path, last.lineno or 0, str(error) or task) from error
        raise explained(error, path, task, left_set(process)) from error
    process.reset()  # this rank goes on; after an error it is replaced


def still_to_write(path: Path, line: int, name: str) -> Wrong:
    """What a `raise NotImplementedError` in that line means: nothing is written, or the line was left in."""
    functions = [f for f in ast.walk(parsed(path.read_text())) if isinstance(f, ast.FunctionDef)]
    around = [f for f in functions if f.lineno <= line <= (f.end_lineno or 0)]
    if all(is_stub(f) for f in around):
        return Todo(f"{name} is not written yet")
    return Wrong(f"{name} comes to its `raise NotImplementedError`, line {line}: take that line out")


def left_set(process: Process) -> list[str]:
    """What the answer has set for the whole process, in a line, if anything."""
    names = process.changed()
    return [f"Your code has left this changed for the whole process: {', '.join(names)}"] if names else []


def explained(error: BaseException, path: Path, task: str, left: Sequence[str] = ()) -> Wrong:
    """An exception as the learner should read it: what, in which of the learner's own lines."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    name, text = type(error).__name__, str(error)
    brief = text.partition("\n")[0][:LONGEST]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return not_python(error, path)
    lines = [line for f in own[-FRAMES:] for line in _frame(path, f)]
    if isinstance(error, SystemExit):
        return Wrong(f"{task} leaves the process (sys.exit): return instead, the grader needs the rank alive", *lines)
    if isinstance(error, bdb.BdbQuit) or text == "EOF when reading a line":
        return Wrong(f"{task} {NO_KEYBOARD}", *lines)
    if isinstance(error, ImportError) and not _inside(own):
        missing = NO_TRITON if error.name == "triton" else ()
        return WrongFile(f"{path.name} cannot be imported: {text}", *lines, *missing)
    if FREED in text:
        return Wrong(NO_MEMORY, *lines, "It was freed after forward, and nothing gathered it for what comes next.")
    if short := SHORT.search(text):
        return Wrong(f"a tensor has {short[2]} bytes of memory and needs {short[1]}: resize_ counts bytes", *lines)
    if not own and left:
        return Wrong(left[0], f"Then the grader could not go on: {name}: {brief}")
    if not own and re.match(rf"{task}(\.\w+)?\(\) (missing|takes|got) ", text):
        return Wrong(f"{task} takes other arguments than in the stub: leave its name and its arguments", f"  {brief}")
    if not own and any(f.name == "_engine_run_backward" for f in traceback.extract_tb(error.__traceback__)):
        return Wrong(f"backward through what {task} has made raises {name}: {brief}")
    if not own:
        hint = ": is there a `return`, or a `yield`?" if "NoneType" in text else ""
        return Wrong(f"the grader cannot use what {task} gave it{hint}", f"  {name}: {brief}", *_tail(error))
    advice = _advice(error, own[-1].line or "")
    if not _inside(own):
        return WrongFile(f"{path.name} cannot be imported: {name}: {brief}".rstrip(": "), *lines, *advice)
    return Wrong(f"{task} raised {name}: {brief}".rstrip(": "), *lines, *advice, *left)


def _advice(error: BaseException, line: str) -> list[str]:
    """What to do about a name that is none, a gradient that is not there, or a call that group or torch refuses."""
    if isinstance(error, NameError) and error.name:
        return [f"Nothing is called `{error.name}` there: is it misspelt, or is its import missing?"]
    text = str(error)
    if "'Work'" in text:
        return [f"{WORK[0].upper()}{WORK[1:]}."]
    if re.search(r"\.(rank|size)\(\)", line) and "'int' object is not callable" in text:
        return ["group.rank and group.size are numbers, without ()."]
    if "'WatchedGroup' object has no attribute" in text:
        return ["`group` has `rank`, `size`, and the calls that the head of this file lists."]
    if re.search(r"\.(send|recv)\(", line) and re.search("Boolean value of Tensor|required positional argument", text):
        return ["group.send(x, to) and group.recv(x, source): first the tensor, which recv fills, then the rank."]
    if ".grad" in line and "'NoneType' object has no attribute" in text:
        return ["A `.grad` is None there: it is not complete yet, has been let go of, or this rank has not used it."]
    return next((said for words, said in REFUSED.items() if words in text), [])


def not_python(error: SyntaxError, path: Path) -> WrongFile:
    return WrongFile(f"{path.name} line {error.lineno} is not Python: {error.msg}", f"    {(error.text or '').strip()}")


def _inside(own: list[traceback.FrameSummary]) -> bool:
    """Whether the learner's code was called, rather than imported."""
    return any(f.name != "<module>" for f in own)


def _frame(path: Path, f: traceback.FrameSummary) -> list[str]:
    return [f"  {path.name}:{f.lineno} in {f.name}", f"      {linecache.getline(str(path), f.lineno or 0).strip()}"]


def _tail(error: BaseException) -> list[str]:
    """The last frames, for an error that the learner's file has no part in: e.g. what it returned was unusable."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__][-2:]
    return [f"  {Path(f.filename).name}:{f.lineno}: {f.line}" for f in frames]


def refuse_ranks(self: World, ranks: int = 2, **_: object) -> None:
    """In place of `World.__init__` while grading: an answer runs on ranks, it does not start any."""
    raise RuntimeError(f"this code starts {ranks} more ranks: the grader has already started it on its ranks")


def limit_memory() -> None:
    """Let a runaway allocation fail in this rank, not bring the machine down (Linux, ranks on the CPU)."""
    if sys.platform == "linux" and os.environ.get("REFIMPL_DEVICE", "cpu") == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
