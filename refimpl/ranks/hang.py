"""Where does a hung rank stand?  A stack that faulthandler wrote, read as "waits in all_reduce at train.py:12".

A rank is asked while it is blocked inside a C++ collective, where its main thread runs no Python code: see stand.py.
The innermost line that is neither a library's nor ours is the line the reader wrote; the collective is the innermost
call into `refimpl.comm` or `torch.distributed` that this line led to.
"""

import linecache
import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch

# Folders, with the slash behind them: torchvision does not lie in torch.
TORCH, REFIMPL = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/"
_TRITON = f"{Path(TORCH).parent}/triton/"  # beside torch, as both bring it: its interpreter runs the reader's kernels
_COMM = f"{REFIMPL}comm/", f"{TORCH}distributed/"
# What runs the reader's code, not the reader's: "<string>" is the fork server.
_LAUNCHER = f"{REFIMPL}ranks/", f"{REFIMPL}grading/", "<string>"
_STDLIB, _SITE = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")  # the one may lie in the other
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')  # ???: between two lines, as where a loop turns
_NEXT = re.compile(r"(?<=[^\n]\n)(?=(?:Current thread|Thread) 0x)")  # within a dump a blank line parts two threads


class Frame(NamedTuple):
    file: str
    line: int  # 0: it is between two
    function: str

    @property
    def in_comm(self) -> bool:
        return self.file.startswith(_COMM)

    @property
    def in_library(self) -> bool:
        return in_stdlib(self.file) or self.in_comm or self.file.startswith((TORCH, _TRITON, *_LAUNCHER))


def in_stdlib(file: str) -> bool:
    """Whether Python itself has brought it."""
    return file.startswith((_STDLIB, "<frozen ")) and not file.startswith(_SITE)


def parse(dump: str) -> list[list[Frame]]:
    """The threads of a faulthandler dump, the main thread last; the frames of each, innermost first.

    Of two dumps the first: a signal ends C code that sleeps, and the rank's thread then answers as well, from later on.
    """
    threads: list[list[Frame]] = []
    for line in _NEXT.split(dump)[0].splitlines():
        if "thread 0x" in line.lower():
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            threads[-1].append(Frame(match[1], int(match[2]) if match[2].isdigit() else 0, match[3]))
    return threads


def is_complete(dump: str) -> bool:
    """Whether the dump reaches the outermost frame of the main thread (or faulthandler's limit of 100 frames)."""
    return dump.endswith((" in <module>\n", "  ...\n"))


def where(dump: str) -> str:
    """What a rank does: "waits in all_reduce at train.py:12: dist.all_reduce(x)", or "computes at ..."."""
    threads = parse(dump)
    # Autograd runs the hooks of a GPU's backward pass in a thread of its own: look for a collective there too. A thread
    # of the library alone does what another one waits for.
    called = (frames for frames in threads if _collective(frames) and not all(frame.in_library for frame in frames))
    stack = next(called, threads[-1] if threads else [])
    if not stack:  # no dump, or one that has not come to the main thread's frames in time
        return "did not say where it stands (blocked inside the operating system?)"
    ours = [frame for frame in stack if not frame.in_library]  # ours and the reader's
    place = next((frame for frame in ours if not frame.file.startswith(REFIMPL)), ours[0] if ours else None)
    collective = _collective(stack)
    source = ""
    if place:
        linecache.checkcache(place.file)  # which may have been edited since another hang was told
        source = linecache.getline(place.file, place.line).strip()
    if not collective and place is stack[0] and ".wait(" in source:  # torch's own Work.wait is C++: it leaves no frame
        collective = "wait"
    # Over a slow link, for this thread or for the one that it waits for: it will arrive.
    travels = any(frame.in_comm and frame.function == "travel" for frames in threads for frame in frames)
    doing = f"{'lets bytes travel' if travels else 'waits'} in {collective}" if collective else "computes"
    if place is None:
        return doing
    at = f"at {place.file}:{place.line}" if place.line else f"in {place.function} of {place.file}"
    return f"{doing} {at}" + (f": {source}" if source else "")


def _collective(stack: list[Frame]) -> str:
    """The public function of `refimpl.comm` or `torch.distributed` that the innermost other frame called, or ""."""
    called = ""
    for frame in stack:
        if not frame.in_library:
            break
        if frame.in_comm and not frame.function.startswith("_") and frame.function != "wrapper":
            called = frame.function
    return called
