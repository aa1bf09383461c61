"""Which collective has a rank queued and never finished?  Read from torch's flight recorder while the rank hangs.

A GPU's rank does not stand where it hangs: its host goes on queueing until it asks the device for a value, and that is
the line its stack shows. The recorder keeps the last 2000 collectives of a process, each with the line that queued it.
"""

import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from refimpl.ranks import hang

_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")  # NCCL's; that of other libraries, in newer versions of torch


def write(file: Path) -> None:
    """In a rank, on any of its threads: leave the name and the line of the oldest unfinished collective in `file`."""
    part = file.with_suffix(".part")
    # An answer that fails is none, and ends no thread: the world has ended, with its folder; no memory is left; ...
    with suppress(Exception):
        part.write_text(json.dumps(oldest()))
        part.rename(file)


def oldest() -> list[object]:
    """Name, file and line of the oldest unfinished collective; nothing if there is none."""
    dumps = [getattr(torch._C._distributed_c10d, name, None) for name in _DUMPS]
    entries: list[dict[str, Any]] = []
    for dump in dumps:
        if dump is not None:
            # Written by torch in this process a moment ago.
            entries += pickle.loads(dump(includeCollectives=True, includeStackTraces=True)).get("entries", [])
    waiting = sorted((e for e in entries if not e["retired"]), key=lambda e: int(e["time_created_ns"]))
    if not waiting:
        return []
    frames = [hang.Frame(f["filename"], f["line"], f["name"]) for f in waiting[0]["frames"]]
    place = next((frame for frame in frames if not frame.in_library), None)
    return [waiting[0]["profiling_name"].split(":")[-1], place.file if place else "", place.line if place else 0]


def unfinished(written: str) -> str:
    """ "; its oldest unfinished collective is all_reduce, from train.py:12", or "" if there is none."""
    found = json.loads(written)
    if not found:
        return ""
    name, path, line = found
    return f"; its oldest unfinished collective is {name}" + (f", from {path}:{line}" if path else "")
