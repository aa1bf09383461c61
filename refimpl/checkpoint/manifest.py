"""checkpoint.json: what a checkpoint is and which files belong to it, with their sizes and checksums.

It is written last, so a folder that has it was finished, and it carries a checksum of itself. Reading one and checking
the files costs a pass over them, about 1 s for 2 GB, and finds a flipped bit, a file cut short, and a file that
belongs to another save. `sha256sum` computes the same checksums by hand.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from refimpl.checkpoint.atomic import LEFTOVER, retired
from refimpl.checkpoint.errors import CheckpointError, naming

NAME = "checkpoint.json"
VERSION = 4  # one more whenever what a save writes changes; 1, without checksums, did not say so
COUNTS = ("world_size", "stage", "parameter_groups", "global_steps", "micro_steps", "global_samples")
NEEDED: dict[str, Any] = dict.fromkeys(("files", "parameters", "tied", "buffers"), dict) | {
    "id": str, "dtype": str, "optimizer": str | None, "scheduler": str | None,
    "order": list, "left_out": list, "apart": list,
} | dict.fromkeys(COUNTS, int)  # fmt: skip
RANK_FILE = re.compile(r"rank\d{5,}\.(safetensors|json|pt)|model\.safetensors")  # .pt and model: until version 3


def ours(name: str) -> bool:
    """Whether a save writes a file of this name; what else lies in a checkpoint is somebody else's."""
    return name == NAME or RANK_FILE.fullmatch(name) is not None


def digest(path: Path) -> dict[str, Any]:
    """Size and checksum of a file."""
    with naming(path), path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": checksum}


def seal(about: dict[str, Any]) -> str:
    """The checksum of a manifest's content, however it is laid out in the file."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def write(path: Path, about: dict[str, Any]) -> None:
    about = {"version": VERSION} | about
    path.write_text(json.dumps(about | {"sha256": seal(about)}, indent=2))


def read(path: Path) -> dict[str, Any]:
    """The manifest as it was written; CheckpointError if it is damaged or of another version."""
    with naming(path):
        text = path.read_bytes()
        try:
            about = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: damaged, it is no JSON ({error}); load another checkpoint") from error
    if not isinstance(about, dict) or about.get("version") != VERSION:
        version = about.get("version", 1) if isinstance(about, dict) else None
        raise CheckpointError(
            f"{path}: of version {version}, or damaged; this refimpl reads version {VERSION}. {other_version(path)}"
        )
    if about.pop("sha256", None) != seal(about):
        raise CheckpointError(f"{path}: damaged or edited, its checksum differs; load another checkpoint")
    wrong = [key for key, kind in NEEDED.items() if key not in about or not isinstance(about[key], kind)]
    if wrong := wrong or [key for key in COUNTS if about[key] < 0] or odd_entries(about):
        raise CheckpointError(
            f"{path}: {', '.join(wrong)}: missing, or of another kind: another program has sealed it; load another "
            "checkpoint"
        )
    return about


def odd_entries(about: dict[str, Any]) -> list[str]:
    """Keys of a manifest whose entries are none that a save writes."""
    digests = [file if isinstance(file, dict) else {} for file in about["files"].values()]
    sizes = [digest.get("bytes") for digest in digests if isinstance(digest.get("sha256"), str)]
    fine = {
        "files": len(sizes) == len(digests) and all(type(size) is int and size >= 0 for size in sizes),
        "order": all(isinstance(name, str) for name in about["order"]),
    }
    return [key for key, is_fine in fine.items() if not is_fine]


def other_version(path: Path) -> str:
    """What to do with a checkpoint that this code does not read."""
    weights = path.parent / "model.safetensors"
    if weights.is_file():
        return (
            f"Its weights are in {weights}: model.load_state_dict(safetensors.torch.load_file(...)) before initialize. "
            "Its rank files are pickles, which nothing here unpickles: to keep the optimizer too, load it with the "
            "refimpl that wrote it, or load another checkpoint"
        )
    return (
        "Load it with the refimpl that wrote it and save its weights with save_16bit_model, or load another checkpoint"
    )


def check(folder: Path, files: dict[str, dict[str, Any]], names: Iterable[str]) -> None:
    """CheckpointError names those of the files `names` that are not what the save wrote."""
    wrong = []
    for name in names:
        path, size = folder / name, files[name]["bytes"]
        if not path.is_file():
            wrong.append(f"{path}: no such file")
        elif path.stat().st_size != size:
            wrong.append(f"{path}: {path.stat().st_size} bytes, {size} were written")
        elif digest(path) != files[name]:
            wrong.append(f"{path}: its checksum differs: damaged, or a file of another save")
    if wrong:
        raise CheckpointError(f"{'; '.join(wrong)}. Bring back the file that was saved, or load another checkpoint")


def is_in(folder: Path) -> bool:
    """OSError where nobody can tell (no permission, a name too long): from Python 3.14 `is_file` is False there too."""
    try:
        return stat.S_ISREG((folder / NAME).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def complete(load_dir: Path) -> list[str]:
    """The tags of the complete checkpoints in a folder; what may not be looked into is none (lost+found)."""
    found = set()
    for entry in load_dir.iterdir():
        leftover = LEFTOVER.fullmatch(entry.name)
        if os.path.isfile(entry / NAME) and (leftover is None or leftover["id"] == "old"):
            found.add(leftover["name"] if leftover else entry.name)
    return sorted(found)


def folder_of(load_dir: Path, tag: str) -> Path:
    """Where the checkpoint `tag` is: in the folder of that name, or beside it if a save died while it replaced it."""
    folder = load_dir / tag
    old = retired(folder)
    return old if not folder.exists() and (old / NAME).is_file() else folder
