"""The temporary folder in which the ranks of one machine find each other, for as long as one of them lives.

Each process that uses it holds it by `flock`, which ends with the process, however that ends. A job of which every
process was killed cannot take its folder away; it leaves one that nobody holds. By that the next job to make a folder
recognises it, and deletes it. On a file system without flock it stays.
"""

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from refimpl.ranks.flock import lock, shared

PREFIX = "refimpl-ranks-"


def make() -> tuple[Path, int]:
    """(a new folder, the descriptor that holds it); those of killed jobs are gone."""
    clear()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with suppress(FileNotFoundError):  # nobody held it yet, and another job has cleared it
            return folder, hold(folder)


def hold(folder: Path) -> int:
    """Keep others from deleting `folder` until the descriptor is closed, or this process ends.

    FileNotFoundError if it is gone.
    """
    handle = shared(folder)
    if not folder.is_dir():
        os.close(handle)
        raise FileNotFoundError(folder)
    return handle


def clear() -> None:
    """Delete the folders that nobody holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            handle = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def mapped(file: Path, nbytes: int) -> mmap.mmap:
    """A file of a folder as memory of all who ask for it; whoever comes first makes it. OSError names it and a remedy.

    FileNotFoundError if the folder is gone.
    """
    with file.open("a+b") as shared:
        try:
            _take_space(shared.fileno(), nbytes)
        except OSError as error:
            text = f"{error.strerror}; {nbytes:,} bytes are needed: make room, raise `ulimit -f`, or set TMPDIR"
            raise OSError(error.errno, text, str(file)) from None
        return mmap.mmap(shared.fileno(), nbytes)


def _take_space(descriptor: int, nbytes: int) -> None:
    """Make the file so long, on Linux with the disk's space: a page that finds none ends a rank, by SIGBUS.

    Where the file system cannot it has none: zeros, as `offload.blocks.take_space` writes, would go over others' words.
    """
    os.ftruncate(descriptor, nbytes)
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.EINVAL, errno.EOPNOTSUPP):
                raise
