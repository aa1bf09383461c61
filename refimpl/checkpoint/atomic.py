"""Files and folders that are whole whenever they have their name, at whatever moment the process or the power dies.

    .<name>.refimpl-<id>    being written, by the save `id`; renamed to <name> when it is whole and on the disk
    .<name>.refimpl-old     what <name> was, while its successor takes the name; whole, and counts as <name>

A rename is atomic, but one folder cannot be renamed over another that is not empty; hence the second form. Whoever dies
leaves one of the two behind. `hold` recognises them: an old folder whose name is free gets it back, the rest goes.
A save holds its folder with `flock`, which ends with the process, so that what another run is writing is left alone.
A file system without flock keeps what a killed save has left.
"""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from refimpl.ranks.flock import lock

LEFTOVER = re.compile(r"\.(?P<name>.+)\.refimpl-(?P<id>old|[0-9a-f]{8})")


def new_id() -> str:
    return uuid4().hex[:8]


def unfinished(path: Path, id_: str) -> Path:
    """Where the save `id_` writes what is to become `path`."""
    return path.with_name(f".{path.name}.refimpl-{id_}")


def retired(path: Path) -> Path:
    """Where `path` stays while its successor takes its name."""
    return path.with_name(f".{path.name}.refimpl-old")


def sync(path: Path) -> None:
    """Return when a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():  # some network disks: not for folders
            raise
    finally:
        os.close(handle)


def write_file(path: Path, fill: Callable[[Path], object]) -> None:
    """fill(another path), then give it the name `path`, in place of what has it."""
    write_files({path: fill})


def write_files(fills: Mapping[Path, Callable[[Path], object]], stale: Iterable[Path] = ()) -> None:
    """fill(another path) of each; when all are on the disk `stale` goes, and they get their names, in this order."""
    id_ = new_id()
    parts = {path: unfinished(path, id_) for path in fills}
    try:
        for path, fill in fills.items():
            fill(parts[path])
            sync(parts[path])
        for path in stale:
            path.unlink()
        for path, part in parts.items():
            os.replace(part, path)
    except Exception:
        for part in parts.values():
            discard(part)
        raise
    for folder in {path.parent for path in fills}:
        sync(folder)


@contextmanager
def alone_with(folder: Path) -> Iterator[None]:
    """What goes missing in the block has been taken away by another run that saves `folder`: OSError that says so."""
    try:
        yield
    except FileNotFoundError as error:
        raise OSError(errno.ENOTEMPTY, f"{error.filename or folder} has gone meanwhile") from error


def replace_folder(new: Path, folder: Path, ours: Callable[[str], bool]) -> None:
    """Give the folder `new` the name `folder`. What had it is deleted, but for files in it that are not `ours`."""
    old = retired(folder)
    if os.path.lexists(folder):
        discard(old)
        os.rename(folder, old)
    try:
        os.rename(new, folder)
    except OSError:
        if os.path.lexists(old) and not os.path.lexists(folder):
            os.rename(old, folder)
        raise
    sync(folder.parent)  # before anything of the old one is deleted
    inherit(old, folder, ours)
    discard(old)


def join_folder(new: Path, folder: Path, mark: str) -> None:
    """Move what `new` holds into `folder`, beside what is there; last the file `mark`, which makes it count."""
    for entry in sorted(new.iterdir()):
        if entry.name != mark:
            os.replace(entry, folder / entry.name)
    sync(folder)
    os.replace(new / mark, folder / mark)
    sync(folder)
    discard(new)


def inherit(old: Path, folder: Path, ours: Callable[[str], bool]) -> None:
    """Move what somebody else has put into `old` to its successor."""
    if old.is_dir() and not old.is_symlink():
        for entry in old.iterdir():
            if not ours(entry.name) and not os.path.lexists(folder / entry.name):
                os.rename(entry, folder / entry.name)


def discard(path: Path) -> None:
    """Delete a leftover, as far as it can be deleted: what stays behind is not taken for whole.

    A folder gets another name first: a rank that is still writing into it finds none, and adds nothing meanwhile.
    """
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            doomed = path.with_name(path.name.rpartition("-")[0] + f"-{new_id()}")
            os.rename(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        else:
            path.unlink()


@contextmanager
def hold(folder: Path, mark: str, ours: Callable[[str], bool]) -> Iterator[bool]:
    """Save into `folder` in the block; whether nobody else does: then what killed saves left is cleared first."""
    handle = os.open(folder, os.O_DIRECTORY)
    try:
        if free := lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB):
            clear(folder, mark, ours)
        lock(handle, fcntl.LOCK_SH)
        yield free
    finally:
        os.close(handle)


@contextmanager
def alone(folder: Path) -> Iterator[bool | None]:
    """Whether nobody holds `folder` by `shared`, and nobody can in the block; None if somebody else is alone with it.

    True on a file system without flock.
    """
    handle = os.open(folder, os.O_DIRECTORY)
    try:
        free: bool | None = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                free = False if lock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB) else None
        yield free
    finally:
        os.close(handle)


def clear(folder: Path, mark: str, ours: Callable[[str], bool]) -> None:
    for entry in sorted(folder.iterdir()):
        found = LEFTOVER.fullmatch(entry.name)
        if found is None:
            continue
        successor = folder / found["name"]
        if found["id"] == "old" and (entry / mark).is_file():
            if not os.path.lexists(successor):
                os.rename(entry, successor)
                continue
            inherit(entry, successor, ours)
        discard(entry)
