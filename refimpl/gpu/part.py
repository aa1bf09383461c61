"""One part of the check in a process of its own: `python -m refimpl.gpu.part NAME DEVICE SECONDS MOST FILE`.

A part is a module with `run(device, seconds)`, a generator of findings. Each finding is written as soon as it is there,
so that a part which crashes or runs out of time leaves what it found before. A crash, and the end of its time after
MOST seconds, leave in its output where each thread stands.
"""

import faulthandler
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch


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


def main(name: str, device: str, seconds: str, most: str, file: str) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(float(most) - WORDS, 0.001))
    part: Part = importlib.import_module(f"refimpl.gpu.{name}")
    with Path(file).open("w") as out:
        for finding in part.run(torch.device(device), float(seconds)):
            out.write(json.dumps(asdict(finding)) + "\n")
            out.flush()
            print(finding.name, finding.value, {None: "", True: "ok", False: "FAILED"}[finding.passed], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
