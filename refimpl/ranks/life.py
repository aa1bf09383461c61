"""A process that ends with its caller, however that ends, and takes along what it has started.

It reads from a pipe whose other end the caller alone holds: the operating system closes that end with the caller. Linux
alone would send a signal (PR_SET_PDEATHSIG), and to the process itself, not to its children.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def tie(listen: Callable[[], object]) -> None:
    """When `listen` has ended, kill this process and its group, which it leads. A thread of its own calls it.

    listen: returns or raises as soon as the caller is gone.
    """
    threading.Thread(target=_outlive, args=(listen,), daemon=True).start()


def _outlive(listen: Callable[[], object]) -> None:
    try:
        listen()
    finally:
        os.killpg(0, signal.SIGKILL)


def until_closed(descriptor: int) -> None:
    """Returns when nobody holds the other end of this pipe. No file object's lock is held, which an exit would want."""
    while os.read(descriptor, 1):
        pass


@contextmanager
def held() -> Iterator[int]:
    """The end of such a pipe that a process is handed. It ends with the block, or with this process."""
    theirs, ours = os.pipe()
    try:
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)
