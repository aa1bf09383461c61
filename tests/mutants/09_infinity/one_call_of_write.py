"""os.write is called once: it may write less than it was given, and says so.

task: save
says: is not whole
"""

import json
import os
import shutil
from hashlib import sha256
from pathlib import Path


def save(root: Path, tag: str, files: dict[str, bytes]) -> None:
    """Write a checkpoint: the files into the folder root/tag, a manifest beside them, and the
    tag into root/latest.

    root/tag/manifest.json is {NAME: {"bytes": size, "sha256": hex digest}} of every file.
    `root` is there already, and names in it that begin with a dot are yours while you write.
    FileExistsError if root/tag is there already.

    The process can be killed between any two calls, and the power can fail: what was not
    flushed by os.fsync is lost then, in whatever order. Whenever that happens, root/latest must
    name a whole checkpoint, the one before or this one, and what is called root/tag must be
    whole. When `save` returns, all is on the disk. A save that was killed leaves something
    behind: the next save of that tag works, and clears it.
    """
    if (root / tag).exists():
        raise FileExistsError(f"{root / tag} is there already")
    new = root / f".{tag}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    about = {name: {"bytes": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()}
    for name, data in {**files, "manifest.json": json.dumps(about).encode()}.items():
        _write(new / name, data)
    _flush(new)
    os.rename(new, root / tag)
    _flush(root)
    _write(root / ".latest.new", tag.encode())
    os.replace(root / ".latest.new", root / "latest")
    _flush(root)


def _write(path: Path, data: bytes) -> None:
    """A file whose content is on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, data)
    os.close(descriptor)
    _flush(path)


def _flush(path: Path) -> None:
    """A file's content, or a folder's names, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
