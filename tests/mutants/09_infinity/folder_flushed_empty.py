"""The folder is flushed while it is empty: nothing says that the names in it are on the disk.

task: save
says: flushed before all of its files are in it
"""

import json
import os
import shutil
from hashlib import sha256


def save(root: Path, tag: str, files: dict[str, bytes]) -> None:
    if (root / tag).exists():
        raise FileExistsError(f"{root / tag} is there already")
    new = root / f".{tag}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    _flush(new)
    about = {name: {"bytes": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()}
    for name, data in {**files, "manifest.json": json.dumps(about).encode()}.items():
        _write(new / name, data)
    os.rename(new, root / tag)
    _flush(root)
    _write(root / ".latest.new", tag.encode())
    os.replace(root / ".latest.new", root / "latest")
    _flush(root)
