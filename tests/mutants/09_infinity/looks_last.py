"""Looks whether the tag is there when all is written.

task: save
says: a refused save leaves
"""

import json
import os
import shutil
from hashlib import sha256


def save(root, tag, files):
    new = root / f".{tag}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    about = {name: {"bytes": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()}
    for name, data in {**files, "manifest.json": json.dumps(about).encode()}.items():
        _write(new / name, data)
    _flush(new)
    if (root / tag).exists():
        raise FileExistsError(f"{root / tag} is there already")
    os.rename(new, root / tag)
    _flush(root)
    _write(root / ".latest.new", tag.encode())
    os.replace(root / ".latest.new", root / "latest")
    _flush(root)
