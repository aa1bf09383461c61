"""Writes into the folder that others look for.

task: save
says: has its name and is not whole
"""

import json
import os
from hashlib import sha256


def save(root, tag, files):
    if (root / tag).exists():
        raise FileExistsError(tag)
    new = root / tag
    new.mkdir()
    about = {name: {"bytes": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()}
    for name, data in {**files, "manifest.json": json.dumps(about).encode()}.items():
        _write(new / name, data)
    _flush(new)
    _write(root / ".latest.new", tag.encode())
    os.replace(root / ".latest.new", root / "latest")
    _flush(root)
