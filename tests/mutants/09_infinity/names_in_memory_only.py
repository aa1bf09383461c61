"""Flushes files and forgets the folder that lists them.

task: save
says: root is not flushed between the two renames
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
    _write(root / ".latest.new", tag.encode())
    os.replace(root / ".latest.new", root / "latest")
    _flush(root)
