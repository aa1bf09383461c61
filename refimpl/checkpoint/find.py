"""Which checkpoint is meant: a folder of checkpoints, a tag, and the file `latest`."""

import os
from pathlib import Path
from typing import Any

from refimpl.checkpoint import manifest
from refimpl.checkpoint.errors import CheckpointError, naming

LONGEST = 4096  # bytes of `latest`


def checked_tag(tag: str, who: str) -> str:
    """`tag`, if it can be the name of a folder; CheckpointError otherwise."""
    plain = tag.isprintable() and tag == tag.strip() and not tag.startswith(".") and "/" not in tag
    if not tag or not plain or tag == "latest":
        raise CheckpointError(
            f"{who}: {tag!r} is no tag: it must be a plain name, without '/', without '.' at its beginning or a blank "
            "at either end, and not 'latest'"
        )
    return tag


def find(load_dir: Path, tag: str | None) -> tuple[Path, dict[str, Any]] | None:
    """The folder of a checkpoint, and its manifest; None if no tag is asked for and there is no file `latest`."""
    latest = load_dir / "latest"
    with naming(load_dir):
        there = manifest.complete(load_dir) if os.path.lexists(load_dir) else []
    complete = f"complete checkpoints in {load_dir}: {', '.join(there) or 'none'}"
    who = "load_checkpoint"
    if tag is None:
        if manifest.is_in(load_dir):
            raise CheckpointError(f"{load_dir}: is a checkpoint itself; pass its parent, and tag={load_dir.name!r}")
        if not os.path.lexists(latest):  # a link to nowhere is damage, and no fresh start
            return None
        tag, who = named_by(latest), str(latest)
        if not tag:
            raise CheckpointError(f"{latest}: is empty; write a tag into it, or pass one; {complete}")
    with naming(load_dir / checked_tag(tag, who)):
        folder = manifest.folder_of(load_dir, tag)
        file = folder / manifest.NAME
        if not manifest.is_in(folder):
            raise CheckpointError(f"{file}: {missing(folder, who, latest)}; {complete}")
    return folder, manifest.read(file)


def named_by(latest: Path) -> str:
    """The tag in a file `latest`. CheckpointError for what is no short text."""
    with naming(latest):
        if latest.exists() and not (latest.is_file() or latest.is_dir()):  # reading a pipe would wait for ever
            raise CheckpointError(f"{latest}: is no file; write a tag into one, or pass one")
        with latest.open("rb") as file:
            text = file.read(LONGEST + 1)
        if len(text) > LONGEST:
            raise CheckpointError(f"{latest}: damaged, it is longer than any tag; write a tag into it, or pass one")
        try:
            return text.decode().strip()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{latest}: damaged, it is no text; write a tag into it, or pass one") from error


def missing(folder: Path, who: str, latest: Path) -> str:
    """Why there is no manifest: nothing there, or what somebody else wrote."""
    named = "" if who == "load_checkpoint" else f" ({latest} names it)"
    return f"no such file{named}{of_deepspeed(folder)}"


def of_deepspeed(folder: Path) -> str:
    """What to do with a checkpoint of DeepSpeed, or a folder of such; "" for what is none."""
    if not any(any(folder.glob(pattern)) for pattern in ("*_model_states.pt", "*/*_model_states.pt")):
        return ""
    return ": this is a checkpoint of DeepSpeed; `refimpl checkpoint import` reads it"


def given(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that a path means: its own folder, or one with a file `latest`. CheckpointError for neither."""
    with naming(folder):
        if manifest.is_in(folder):
            return folder, manifest.read(folder / manifest.NAME)
        found = find(folder, None)
        if found is None:
            there = ", ".join(manifest.complete(folder)) if folder.is_dir() else ""
            hint = f"complete checkpoints there: {there}" if there else "pass the folder of a checkpoint, or its parent"
            raise CheckpointError(
                f"{folder}: {missing(folder, 'load_checkpoint', folder)}: no {manifest.NAME}, no latest; {hint}"
            )
        return found
