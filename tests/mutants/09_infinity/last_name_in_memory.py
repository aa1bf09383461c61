"""Returns before the last rename is on the disk.

task: save
says: root is not flushed at the end
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
