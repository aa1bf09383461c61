"""Another name for every attempt: what killed saves leave piles up.

task: save
says: the next save of that tag leaves it there
"""

import json
import os
from hashlib import sha256


def save(root, tag, files):
    if (root / tag).exists():
        raise FileExistsError(tag)
    new = root / f".{tag}.{os.getpid()}.{os.urandom(4).hex()}"
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
