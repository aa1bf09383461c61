"""What fails on one rank is an error on every rank, and the error names the rank, the file and the remedy.

A rank that raised alone would leave the others waiting for it in the next collective: `together` lets all of them hear
of it first. DeepSpeed has no such exchange: a full disk on one rank is a hang, or a timeout, on the others.
"""

import errno
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from refimpl.comm.group import Group
from refimpl.ranks.causes import causes
from refimpl.ranks.lost import echo

T = TypeVar("T")
REMEDIES = {
    errno.ENOSPC: "free space on that disk, or save elsewhere",
    errno.EDQUOT: "your quota on that disk is used up: free space, or save elsewhere",
    errno.EFBIG: "raise the limit on a file's size (ulimit -f), or save elsewhere",
    errno.EIO: "the disk fails: copy what it still gives, and use another",
    errno.ESTALE: "the server has let go of the file: mount it anew",
    errno.EACCES: "change the permissions, or use another folder",
    errno.EPERM: "change the permissions, or use another folder",
    errno.EROFS: "this disk cannot be written: save elsewhere",
    errno.EBUSY: "another disk is mounted there, or a program holds it: use another folder or tag",
    errno.ENOENT: "check the path; all ranks must see the same folder",
    errno.EEXIST: "move what is there away, or use another folder",
    errno.ENOTDIR: "a file stands where a folder is needed: move it away, or use another folder",
    errno.EISDIR: "a folder stands where a file is needed: move it away, or use another name",
    errno.ENOTEMPTY: "another run saves there at this moment: give each run a folder of its own",
    errno.ENAMETOOLONG: "choose a shorter tag or folder",
    errno.ELOOP: "these links lead to each other: point them at a folder or file",
}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read as asked; the message names the file and the remedy."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Whatever goes wrong in the block becomes a CheckpointError about `path`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: {explained(error)}") from error


def explained(error: BaseException) -> str:
    """What the system said, and what to do about it. torch and safetensors wrap the system's error in their own."""
    if is_ours(error):  # of a disk that something is offloaded to: it says itself which
        return str(error)
    inner = next((layer for layer in causes(error) if isinstance(layer, OSError)), None)
    if inner is not None:
        number, text = inner.errno, inner.strerror or str(inner)
    else:
        found = re.search(r"\(os error (\d+)\)", str(error))  # as Rust writes it
        number, text = (int(found[1]) if found else None), f"{type(error).__name__}: {error}"
    remedy = REMEDIES.get(number) if number is not None else None
    return f"{text}; {remedy}" if remedy else text


def is_ours(error: BaseException) -> bool:
    """Whether it is of a kind of this project's, whose text says all."""
    return type(error).__module__.startswith("refimpl")


def together(group: Group, do: Callable[[], T], kind: type[Exception] = CheckpointError) -> T:
    """do() on every rank. If any rank's raises, every rank raises one of `kind` that says which and why.

    A collective. `do` must hold none itself: a rank that has failed would be missing in it.
    """
    failure: Exception | None = None
    try:
        result = do()
    except Exception as error:
        failure = error
    mine = None if failure is None else str(failure) if is_ours(failure) else repr(failure)
    said = group.all_gather_object(mine)
    if any(text is not None for text in said):
        told = kind(by_rank(dict(zip(group.ranks, said, strict=True))))
        raise (echo(told) if failure is None else told) from failure
    return result


def by_rank(said: Mapping[int, str | None]) -> str:
    """Each rank's text behind its number in the job; the ranks that say the same, once."""
    ranks: dict[str, list[str]] = {}
    for rank, text in said.items():
        if text is not None:
            ranks.setdefault(text, []).append(str(rank))
    return "; ".join(f"rank{'s' * (len(who) > 1)} {', '.join(who)}: {text}" for text, who in ranks.items())
