"""Every test that needs a GPU: those marked `gpu`, in the files that have one (others may import what is not here)."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from refimpl.gpu.part import Finding

ROOT = Path(__file__).parents[2]
MARK = "mark." + "gpu"  # this file has none


def run(device: torch.device, seconds: float) -> Iterator[Finding]:
    files = [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in file.read_text()]
    choice = [*files, "-m", "gpu", "-p", "no:cacheprovider", *(["--collect-only"] if device.type == "cpu" else [])]
    done = subprocess.run([sys.executable, "-m", "pytest", *choice], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    print(done.stdout, done.stderr)
    yield Finding("tests marked gpu", lines[-1:] if done.returncode == 0 else lines[-15:], done.returncode == 0)
