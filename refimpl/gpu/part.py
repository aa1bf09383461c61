"""One part of the check in a process of its own: `python -m refimpl.gpu.part NAME DEVICE SECONDS UNTIL FILE`.

A part is a module with `run(device, seconds)`, a generator of findings. Each finding is written as soon as it is there,
so that a part which crashes or runs out of time leaves what it found before. It is killed at the instant UNTIL of this
machine's monotonic clock: just before, it says where each thread stands. It leads a process group, and its input is a
pipe: when nobody holds the other end, because the check was killed, it and all that it has started end.
"""

import faulthandler
import importlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from refimpl.ranks import life


@dataclass(frozen=True)
class Finding:
    """One line of the report. `passed` None: a measure, neither right nor wrong."""

    name: str
    value: Any  # for json
    passed: bool | None = None


class Part(Protocol):
    def run(self, device: torch.device, seconds: float) -> Iterator[Finding]:
        """What this part finds, within about `seconds`."""


WORDS = 2.0  # seconds before its end that a part says where it stands


def main(name: str, device: str, seconds: str, until: str, file: str) -> None:
    left = max(float(until) - WORDS - time.monotonic(), 0.001)  # importing torch has taken some of it
    faulthandler.dump_traceback_later(left)
    part: Part = importlib.import_module(f"refimpl.gpu.{name}")
    with Path(file).open("w") as out:
        for finding in part.run(torch.device(device), min(float(seconds), left)):
            out.write(json.dumps(asdict(finding)) + "\n")
            out.flush()
            print(finding.name, finding.value, {None: "", True: "ok", False: "FAILED"}[finding.passed], flush=True)


if __name__ == "__main__":
    life.tie(lambda: life.until_closed(sys.stdin.fileno()))
    main(*sys.argv[1:])
