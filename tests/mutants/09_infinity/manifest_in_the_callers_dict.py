"""The manifest is put among the caller's files.

task: save
says: the caller's dict `files` was changed
"""

import json
import os
import shutil
from hashlib import sha256


def save(root, tag, files):
    if (root / tag).exists():
        raise FileExistsError(f"{root / tag} is there already")
    new = root / f".{tag}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    about = {name: {"bytes": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()}
    files["manifest.json"] = json.dumps(about).encode()
    for name, data in files.items():
        _write(new / name, data)
    _flush(new)
    os.rename(new, root / tag)
    _flush(root)
    _write(root / ".latest.new", tag.encode())
    os.replace(root / ".latest.new", root / "latest")
    _flush(root)
