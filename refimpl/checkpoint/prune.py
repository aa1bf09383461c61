"""Which checkpoints to keep when disks are finite: the last K, every n-th step, and always the one `latest` names.

A checkpoint loses its manifest first, so that what is half deleted is not taken for whole; then its own files, and its
folder if nobody else has put something into it. Folders that are no checkpoints of ours are not looked at.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refimpl.checkpoint import atomic, manifest
from refimpl.checkpoint.errors import CheckpointError, explained, naming
from refimpl.checkpoint.find import named_by


class Gone(CheckpointError):
    """Somebody else has deleted it meanwhile."""


@dataclass(frozen=True)
class Found:
    """A complete checkpoint in a folder of checkpoints."""

    tag: str
    path: Path
    about: dict[str, Any]
    written: int  # when: nanoseconds

    @property
    def step(self) -> int:
        return int(self.about["global_steps"])

    @property
    def bytes(self) -> int:
        return sum(file["bytes"] for file in self.about["files"].values())


def found(path: Path, tag: str | None = None) -> Found:
    """The checkpoint in this folder. CheckpointError if its manifest is damaged; `Gone` if there is none any more."""
    file = path / manifest.NAME
    try:
        with naming(file):
            written = file.stat().st_mtime_ns
        return Found(tag or path.name, path, manifest.read(file), written)
    except CheckpointError as error:
        if file.exists():
            raise
        raise Gone(str(error)) from error


def in_order(folder: Path) -> list[Found]:
    """The complete checkpoints in a folder by step, the oldest first. CheckpointError for a damaged manifest."""
    with naming(folder):
        paths = {tag: manifest.folder_of(folder, tag) for tag in manifest.complete(folder)}
    there = []
    for tag, path in paths.items():
        with suppress(Gone):
            there.append(found(path, tag))
    return sorted(there, key=lambda f: (f.step, f.written, f.tag))


def to_delete(there: list[Found], keep: int, every: int | None, latest: str | None) -> list[Found]:
    """All but the last `keep`, those at a multiple of `every` steps, and `latest`. ValueError for keep < 1."""
    if keep < 1 or (every is not None and every < 1):
        raise ValueError(f"keep={keep}, every={every}: at least 1")
    return [f for f in there[:-keep] if f.tag != latest and not (every and f.step % every == 0)]


def latest_of(folder: Path) -> str | None:
    """The tag in the file `latest`, if there is one."""
    path = folder / "latest"
    return named_by(path) if os.path.lexists(path) else None


def prune(folder: Path, keep: int, every: int | None = None, dry_run: bool = False) -> list[Found]:
    """Delete the checkpoints that need not be kept; which. What a save beside it is writing is left alone.

    So is the newest while somebody saves: `latest` may be about to name it. CheckpointError, when all others are gone,
    names those that somebody is loading or exporting: they are left.
    """
    with naming(folder):
        if dry_run:
            return to_delete(in_order(folder), keep, every, latest_of(folder))
        with atomic.hold(folder, manifest.NAME, manifest.ours) as nobody_saves:
            there = in_order(folder)
            newest = None if nobody_saves else max(there, key=lambda f: f.written, default=None)
            doomed = [f for f in to_delete(there, keep, every, latest_of(folder)) if f is not newest]
            left = [str(each.path) for each in doomed if not delete(each)]
            if left:
                raise CheckpointError(
                    f"{', '.join(left)}: left, somebody is loading or exporting it; prune again when that is done"
                )
    return doomed


def delete(doomed: Found) -> bool:
    """The files of a checkpoint, its manifest first, and the folder if that was all. False if somebody reads it.

    Nothing, if a save has given its name to another meanwhile, or another prune is at it.
    """
    path = doomed.path
    if path.is_symlink():
        path.unlink(missing_ok=True)
        return True
    try:
        with atomic.alone(path) as free:
            if not free:
                return free is None or not (path / manifest.NAME).exists()
            if found(path).about["id"] != doomed.about["id"]:
                return True
            (path / manifest.NAME).unlink()
            for file in [file for file in path.iterdir() if manifest.ours(file.name)]:
                file.unlink()
    except (Gone, FileNotFoundError):
        return True
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {explained(error)}") from error
    with suppress(OSError):
        path.rmdir()
    return True
