"""Files that belong to the user: where this system keeps them, replaced in one move, set aside when damaged."""

import os
import sys
import tempfile
from itertools import count
from pathlib import Path


def data_folder() -> Path:
    """The folder for this user's data: REFIMPL_DATA, or the platform's own. It need not exist yet."""
    if given := os.environ.get("REFIMPL_DATA"):
        return Path(given)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "refimpl"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "refimpl"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "refimpl"


def replace(path: Path, text: str) -> None:
    """Write `text` to `path` in one move: whenever we are interrupted, it holds the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def free_name(path: Path, word: str) -> Path:
    """A name beside `path` that no file has: "notes.kept-1.py" for the word "kept"."""
    names = (path.with_name(f"{path.stem}.{word}-{n}{path.suffix}") for n in count(1))
    return next(name for name in names if not name.exists())


def set_aside(path: Path, word: str = "damaged") -> Path:
    """Rename a file to a name that no file has; returns it."""
    return path.rename(free_name(path, word))
