"""Grades chapter 09's save: killed before each of its calls to the file system, and what was flushed before what."""

import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from refimpl.grading.compare import Wrong, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup

FILES = {
    "old": {"rank0.bin": b"zero" * 5000, "rank1.bin": b"one"},
    "new": {"rank0.bin": b"ZERO" * 5000, "rank1.bin": b"", "notes.json": b"{}"},
    "next": {"rank0.bin": b"again"},
}
CALLS = {
    "open", "write", "writelines", "close", "flush", "fsync", "fdatasync", "sync", "mkdir", "rename", "replace", "link",
    "symlink", "unlink", "remove", "rmdir", "truncate", "ftruncate", "sendfile", "utime", "chmod",
}  # fmt: skip
MOST = 300  # calls of one save


def whole(folder: Path) -> str:
    """What is wrong with a checkpoint, or ""."""
    if not folder.is_dir():
        return "there is no such folder"
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        return "it has no manifest.json"
    try:
        about = json.loads(manifest.read_bytes())
    except ValueError:
        return f"its manifest.json is no JSON ({len(manifest.read_bytes())} bytes of it are there)"
    expected = FILES[folder.name]
    if not isinstance(about, dict) or about.keys() != expected.keys():
        return f"its manifest.json names {sorted(about)}, expected {sorted(expected)}"
    for name, data in expected.items():
        path = folder / name
        if not path.is_file():
            return f"it has no {name}"
        if path.read_bytes() != data:
            return f"{name} has {len(path.read_bytes())} of {len(data)} bytes, or others"
        if about[name] != {"bytes": len(data), "sha256": sha256(data).hexdigest()}:
            return f"manifest.json says {about[name]} of {name}, which is not so"
    return ""


def judge(root: Path, when: str, tags: tuple[str, ...]) -> str:
    """The tag that `latest` names, one of `tags`. Wrong if what it names, or what has a name, is not whole."""
    latest = root / "latest"
    require(latest.is_file(), f"{when}, root/latest is gone: replace it by another file, never remove it")
    tag = latest.read_text()
    also = " or ".join(map(repr, tags))
    why = "the tag and nothing else" if tag.strip() in tags else "what is written in place can be found half written"
    require(
        tag in tags,
        f"{when}, root/latest holds {tag!r}, expected {also}: {why}",
    )
    fault = whole(root / tag)
    require(not fault, f"{when}, root/latest names {tag!r}, which is not whole: {fault}")
    for other in ("old", "new"):
        fault = whole(root / other) if (root / other).exists() else ""
        require(not fault, f"{when}, root/{other} has its name and is not whole: {fault}")
    return tag


def killed(at: int, do: Callable[[], object]) -> str:
    """do() in a process that is killed before its at-th call to the file system: which that is, "" if it ended."""
    told, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, here idle ones of torch
        child = os.fork()
    if child == 0:
        numbers = count(1)

        def look(frame: FrameType, event: str, arg: Any) -> None:
            if event == "c_call" and arg.__name__ in CALLS and next(numbers) == at:
                sys.setprofile(None)
                os.write(tell, arg.__name__.encode())
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(look)
        with suppress(BaseException):
            do()
        os._exit(0)
    os.close(tell)
    os.waitpid(child, 0)
    with open(told, "rb") as pipe:
        return pipe.read().decode()


@contextmanager
def folder(inside: str | None = None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="grading-", dir=inside) as name:
        yield Path(name)


def lowest_descriptor() -> int:
    """The number that the next file to be opened gets: the lowest that is free."""
    descriptor = os.dup(0)
    os.close(descriptor)
    return descriptor


def left_over(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name not in (*FILES, "latest"))


@on_ranks(1, timeout=20)
def test_save(answer: Answer, group: WatchedGroup) -> None:
    with folder() as root:
        case("two saves, one after the other")
        free = lowest_descriptor()
        with untouched(files=FILES["old"]):
            answer.save(root, "old", FILES["old"])
        open_still = "a file is open after the save: close each descriptor, or a job runs out of them"
        require(lowest_descriptor() == free, open_still)
        require((root / "latest").is_file(), "there is no root/latest")
        judge(root, "after the first save", ("old",))
        answer.save(root, "new", dict(FILES["new"]))
        judge(root, "after the second save", ("new",))
        require(not left_over(root), f"a save leaves {left_over(root)} behind")
        case("a tag that is there already")
        try:
            answer.save(root, "old", {"rank0.bin": b"other"})
        except FileExistsError:
            judge(root, "after a refused save", ("new",))
            require(not left_over(root), f"a refused save leaves {left_over(root)} behind: look before you write")
        except OSError as error:
            said = "a tag that is there already is found out too late: look first, and raise FileExistsError"
            raise Wrong(said, f"  {error}") from error
        else:
            raise Wrong("a tag that is there already was written again: raise FileExistsError")
    judge_kills(answer)
    judge_short_writes(answer)
    judge_order(answer)


def judge_kills(answer: Answer) -> None:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a kill loses no page: hundreds of flushes saved
    with folder(memory) as pristine:
        answer.save(pristine, "old", dict(FILES["old"]))
        for at in range(1, MOST):
            with folder(memory) as place:
                root = Path(shutil.copytree(pristine, place / "root"))
                call = killed(at, lambda root=root: answer.save(root, "new", dict(FILES["new"])))
                if not call:
                    return
                case(f"killed before the {call}, call number {at} to the file system")
                judge(root, f"killed before the {call} that is call number {at}", ("old", "new"))
                go_on(answer, root)


def go_on(answer: Answer, root: Path) -> None:
    """The next start saves once more: the tag that was cut short, or, if that is there, the next."""
    tag, left = "next" if (root / "new").exists() else "new", left_over(root)
    public = [name for name in left if not name.startswith(".")]
    require(not public, f"a killed save has left {public}: only names that begin with a dot are yours")
    for name in left:
        if (root / name).is_dir():  # as a save of more files leaves it
            (root / name / "rank9.bin").write_bytes(b"old")
    try:
        answer.save(root, tag, dict(FILES[tag]))
    except OSError as error:
        raise Wrong(
            f"a killed save has left {left}, and the next save of {tag!r} fails on it: {type(error).__name__}",
            "what a killed save has left must be removed, or be written over, by the next one",
        ) from None
    judge(root, f"after a killed save and a save of {tag!r}", (tag,))
    mixed = "a file that a killed save has left is in the new checkpoint: clear its folder before you write into it"
    require(not (root / tag / "rank9.bin").exists(), mixed)
    if tag == "new":
        require(not left_over(root), f"a killed save has left {left}, and the next save of that tag leaves it there")


def judge_short_writes(answer: Answer) -> None:
    case("os.write writes 3 bytes at a time, which it may: it returns how many")
    write = os.write
    with folder() as root, mock.patch.object(os, "write", lambda file, data: write(file, bytes(data)[:3])):
        answer.save(root, "old", dict(FILES["old"]))
        judge(root, "after a save by calls of os.write that wrote less than they were given", ("old",))


def judge_order(answer: Answer) -> None:
    """For the power that fails: no kill shows it. Files are told by their inodes, which a rename keeps."""
    case("what is on the disk when the power fails")
    events: list[tuple[str, int, int]] = []  # what happened, to which inode, of how many bytes, or names, then
    real = {name: getattr(os, name) for name in ("fsync", "fdatasync", "rename", "replace") if hasattr(os, name)}

    def fsync(handle: Any) -> None:
        descriptor = handle if isinstance(handle, int) else handle.fileno()
        about = os.fstat(descriptor)
        size = len(os.listdir(descriptor)) if stat.S_ISDIR(about.st_mode) else about.st_size
        events.append(("flushed", about.st_ino, size))
        real["fsync"](handle)

    def renaming(name: str) -> Callable[..., None]:
        def rename(old: Any, new: Any, **options: Any) -> None:
            events.append(("named", os.stat(old).st_ino, 0))
            real[name](old, new, **options)

        return rename

    with folder() as root:
        watched = {"rename": renaming("rename"), "replace": renaming("replace")}
        vars(os).update({name: watched.get(name, fsync) for name in real})
        try:
            answer.save(root, "old", dict(FILES["old"]))
        finally:
            vars(os).update(real)
        flushed_before_named(root, events)


def flushed_before_named(root: Path, events: list[tuple[str, int, int]]) -> None:
    """Wrong unless the order of these events leaves a whole checkpoint whatever unflushed is lost."""
    inode = {path: path.stat().st_ino for path in (root, *root.rglob("*"))}

    def when(what: str, path: Path, after: int = -1, size: int | None = None) -> int:
        """The first such event behind `after`; a number beyond all if there is none."""
        found = (i for i, (w, n, s) in enumerate(events) if (w, n) == (what, inode[path]) and size in (None, s))
        return next((i for i in found if i > after), len(events))

    tag, latest = root / "old", root / "latest"
    named = when("named", tag)
    require(
        named < len(events), "root/old was never renamed: a name that is there from the beginning names half a folder"
    )
    for path in sorted(tag.iterdir()):
        size = path.stat().st_size
        if when("flushed", path) == len(events):
            raise Wrong(f"{path.name} is never flushed: the name of the folder may reach the disk before its content")
        require(
            when("flushed", path, size=size) < len(events),
            f"{path.name} is flushed before all of it is written: f.flush(), or close the file, before os.fsync",
        )
        require(when("flushed", path, size=size) < named, f"root/old gets its name before {path.name} is flushed")
    require(
        when("flushed", tag) < named, "the new folder itself, its list of names, is not flushed before it gets its name"
    )
    early = "the new folder is flushed before all of its files are in it: their names may be lost when it has its own"
    require(when("flushed", tag, size=len(list(tag.iterdir()))) < named, early)
    pointed = when("named", latest)
    require(pointed < len(events), "root/latest was not put there by a rename: it can be found half written")
    require(named < pointed, "root/latest names the folder before the folder has its name")
    require(
        when("flushed", root, after=named) < pointed,
        "root is not flushed between the two renames: `latest` may reach the disk before the name that it holds",
    )
    size = latest.stat().st_size
    require(when("flushed", latest, size=size) < pointed, "the new `latest` is not flushed before it gets its name")
    require(
        when("flushed", root, after=pointed) < len(events),
        "root is not flushed at the end: `save` returns, the power fails, and `latest` is the old one",
    )
