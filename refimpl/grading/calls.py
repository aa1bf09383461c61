"""What an answer really calls while it runs: refimpl's own functions, torch.distributed, a function of the solutions.

cheats.py reads the file's text, so it does not see a name that is made at run time (importlib, sys.modules, getattr).
Here Python itself reports each call (`sys.setprofile`), and one that comes straight from a line of the answer's file is
judged by where its function stands. The grader's oracle may call what it likes. Threads that begin meanwhile are looked
at too, with what is handed to them. Code that the answer makes by `exec` has no file to be judged by, so `exec` itself
is named: no exercise needs it.

Not seen: refimpl's text, read from its file and pasted. Whoever goes that far knows it.
"""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from inspect import CO_GENERATOR, getmro, isclass
from pathlib import Path
from types import CodeType, FrameType

import torch.distributed as dist
from torch._compile import _disable_dynamo

import refimpl
from refimpl.grading.cheats import GRADERS, MOVES, around, closed, for_graders
from refimpl.grading.compare import require

REFIMPL = Path(refimpl.__file__).parent
SOLUTIONS, DISTRIBUTED = REFIMPL.parent / "solutions", Path(dist.__file__).parent
WRAPPED = _disable_dynamo(lambda: None).__code__  # calls what it holds as `fn`, such as torch's own checkpoint
HANDED = "refimpl.grading.traffic"  # the group that an answer is given
CONTROL = "refimpl.comm.control"  # what that inherits, and sends beside the ledger
MAKERS = (exec, eval, compile)
ON = {
    threading.Thread.__init__.__code__: "target",
    ThreadPoolExecutor.submit.__code__: "fn",
}  # who calls which argument


class Calls:
    """Watches one answer. `cheat` is what it did instead of the exercise, in a sentence, or ""."""

    def __init__(self, path: Path) -> None:
        self.path, self.cheat = str(path), ""
        self.known: dict[CodeType, str] = {}  # each function that the answer has called -> what is wrong with that

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, calls are looked at. At the end, whatever else went wrong, Wrong if one was a way round."""
        before = sys.getprofile(), threading.getprofile()
        sys.setprofile(self.look)
        threading.setprofile(self.look)
        try:
            yield
        finally:
            sys.setprofile(before[0])
            threading.setprofile(before[1])
            require(not self.cheat, self.cheat)

    def look(self, frame: FrameType, event: str, arg: object) -> None:
        """Python calls this at every call of a function."""
        if event == "call":
            caller = frame.f_back
        elif event == "c_call":  # a function in C has no frame of its own
            caller = frame
        else:  # half of the events: a return needs no look at who called
            return
        if caller is None or caller.f_code.co_filename != self.path or self.cheat:
            return
        if event == "c_call":
            said = made(arg) if arg in MAKERS else ""
        elif frame.f_code is WRAPPED:
            wrapped = frame.f_locals["fn"]  # a mode of the grader's stands there, too
            said = of(wrapped) if wrapped.__module__.startswith("torch.") else ""
        elif name := ON.get(frame.f_code):
            said = of(frame.f_locals[name])
        else:
            if frame.f_code not in self.known:
                self.known[frame.f_code] = self.called(frame)
            said = self.known[frame.f_code]
        if said:
            self.cheat = f"{Path(self.path).name} line {caller.f_lineno}: {said}"

    def called(self, frame: FrameType) -> str:
        """What is wrong with a call of this function, or ""."""
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if frame.f_code.co_flags & CO_GENERATOR:  # one that the answer has let go of is closed as if it were called
            return ""
        if path.is_relative_to(SOLUTIONS) and str(path) != self.path:
            return "a function of the solutions is called; write the answer here"
        if path.is_relative_to(DISTRIBUTED):
            logged = frame.f_locals.get("func")  # torch wraps its collectives, to log them
            name = getattr(logged, "__name__", name)
            return around(f"torch.distributed.{name}") if name in MOVES else ""
        if not path.is_relative_to(REFIMPL):
            return ""
        module = ".".join(path.relative_to(REFIMPL.parent).with_suffix("").parts)
        if name in ("__getattr__", "__bool__"):  # a package imports what is asked for; one_truth: nothing is called yet
            return ""
        return own(module, frame.f_code.co_qualname)

    def inherited(self, task: object) -> None:
        """Look whether the task itself is refimpl's, or derived from a class of it."""
        kin = getmro(task) if isclass(task) else (task,)
        self.cheat = self.cheat or next(filter(None, map(of, kin)), "")


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, no call is looked at: for what is ours and runs long. Python is half as fast while it reports calls."""
    look = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(look)


def of(thing: object) -> str:
    """What is wrong with using this function or class, or ""."""
    return own(getattr(thing, "__module__", ""), getattr(thing, "__qualname__", ""))


def own(module: str, name: str) -> str:
    if module == HANDED:
        name = name.rpartition(".")[2]
        return for_graders(name) if name in GRADERS else ""
    if module == CONTROL:
        return f"group.{name.rpartition('.')[2]} is not among the calls of `group` that the exercise lists"
    return closed(f"{module}.{name}")


def made(maker: object) -> str:
    return f"{getattr(maker, '__name__', '')} makes code at run time, which nobody can look at: write the answer out"
