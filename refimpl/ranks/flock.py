"""A folder that a process holds by `flock`: the lock ends with the process, however that ends.

What nobody holds any more was left by processes that were killed. File systems without flock hold nothing.
"""

import fcntl
import os
from pathlib import Path


def lock(handle: int, kind: int) -> bool:
    """False if somebody else's lock forbids this one, or the file system has none."""
    try:
        fcntl.flock(handle, kind)
    except OSError:
        return False
    return True


def shared(folder: Path) -> int:
    """A handle that keeps `folder` from being taken away until it is closed, or its process ends; waits for who does.

    FileNotFoundError if it is gone.
    """
    handle = os.open(folder, os.O_DIRECTORY)
    lock(handle, fcntl.LOCK_SH)
    return handle
