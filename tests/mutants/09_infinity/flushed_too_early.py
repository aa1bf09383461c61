"""Flushes the file while its content is in Python's own buffer.

task: save
says: is flushed before all of it is written
"""

import json
import os
import shutil
from hashlib import sha256


def save(root, tag, files):
    if (root / tag).exists():
        raise FileExistsError(tag)
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


def _write(path, data):
    with open(path, "wb") as file:
        file.write(data)
        os.fsync(file.fileno())
