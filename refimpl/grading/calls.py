"""What an answer really calls while it runs: refimpl's own functions, torch.distributed, a function of the solutions.

cheats.py reads the file's text, so it does not see a name that is made at run time (importlib, sys.modules, getattr).
Here Python itself reports each call (`sys.setprofile`), and one that comes straight from a line of the answer's file is
judged by where its function stands. The grader's oracle may call what it likes.

Not seen: calls in another thread, and those of code that the answer makes by `exec`. Whoever goes that far knows it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_GENERATOR, getmro, isclass
from pathlib import Path
from types import CodeType, FrameType

import torch.distributed as dist

import refimpl
from refimpl.grading.cheats import GRADERS, MOVES, around, closed, for_graders
from refimpl.grading.compare import require

REFIMPL = Path(refimpl.__file__).parent
SOLUTIONS, DISTRIBUTED = REFIMPL.parent / "solutions", Path(dist.__file__).parent
HANDED = "refimpl.grading.traffic"  # the group that an answer is given


class Calls:
    """Watches one answer. `cheat` is what it did instead of the exercise, in a sentence, or ""."""

    def __init__(self, path: Path) -> None:
        self.path, self.cheat = str(path), ""
        self.known: dict[CodeType, str] = {}  # each function that the answer has called -> what is wrong with that

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, calls are looked at. At the end, whatever else went wrong, Wrong if one was a way round."""
        before = sys.getprofile()
        sys.setprofile(self.look)
        try:
            yield
        finally:
            sys.setprofile(before)
            require(not self.cheat, self.cheat)

    def look(self, frame: FrameType, event: str, arg: object) -> None:
        """Python calls this at every call of a function."""
        caller = frame.f_back
        if event != "call" or caller is None or caller.f_code.co_filename != self.path:
            return
        if frame.f_code not in self.known:
            self.known[frame.f_code] = self.called(frame)
        if not self.cheat and self.known[frame.f_code]:
            self.cheat = f"{Path(self.path).name} line {caller.f_lineno}: {self.known[frame.f_code]}"

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
        if module == HANDED:
            return for_graders(name) if name in GRADERS else ""
        if name == "__getattr__":  # of a package that imports what is asked for: nothing is called yet
            return ""
        return closed(f"{module}.{frame.f_code.co_qualname}")

    def inherited(self, task: object) -> None:
        """Look whether the task itself is refimpl's, or derived from a class of it."""
        kin = getmro(task) if isclass(task) else (task,)
        names = [f"{getattr(k, '__module__', '')}.{getattr(k, '__qualname__', '')}" for k in kin]
        self.cheat = self.cheat or next(filter(None, map(closed, names)), "")
