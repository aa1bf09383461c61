"""Files that a command writes once it has measured: a full disk is one line and status 1, and what was printed stays.

JSON knows neither NaN nor infinity: they become null.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Around what writes `file`. SystemExit, status 1, where it cannot be written, after one line on stderr."""
    try:
        yield
    except OSError as error:
        sys.stdout.flush()
        print(f"{file}: cannot be written: {error.strerror or error}; what is printed above is all", file=sys.stderr)
        raise SystemExit(1) from None


def write_json(file: Path, found: Any, indent: int | None = 1) -> None:
    """`found`, of dicts, lists, numbers and texts, as JSON. SystemExit as `writing`."""
    with writing(file):
        file.write_text(json.dumps(finite(found), indent=indent, allow_nan=False) + "\n", encoding="utf-8")


def finite(found: Any) -> Any:
    """The same with None for every number that is not finite."""
    if isinstance(found, Mapping):
        return {key: finite(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found
