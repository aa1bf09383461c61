"""Rank 3 of 8 whose model is on the pretended device, with streams on paper: what a GPU's streams and host race for.

In a process of its own, which has the device for good. See `stream_log` for what is seen there.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pretend
import torch
import torch.distributed as dist
from stream_log import Recorder, Watch, needless, pretended, races

from refimpl.comm.group import Group

DEVICE = "pretend:0"


@dataclass
class Seen:
    """`asked`: where and how often the host waited since the program cleared it; `needless`: see `stream_log`."""

    races: list[str]
    asked: dict[str, int]
    needless: set[str]


def begin(library: Path) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    pretend.load(library)


def seen(program: Callable[[Group, Recorder, Watch], None]) -> Seen:
    """What the log of program(group, recorder, watch) tells."""
    recorder = Recorder()
    with pretended(backend="cpu:fake,pretend:fake"), Watch(recorder, "pretend") as watch:
        program(Group(dist.group.WORLD, device=torch.device(DEVICE), streams=recorder), recorder, watch)
        gc.collect()
    return Seen(races(recorder.log), dict(watch.asked), needless(recorder, ("inputs", "result", "host", ": ")))
