"""os.write is called once: it may write less than it was given, and says so.

task: save
says: is not whole
"""

import os
from pathlib import Path


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, data)
    os.close(descriptor)
    _flush(path)
