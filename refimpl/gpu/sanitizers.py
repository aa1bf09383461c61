"""Part 4: torch's own stream sanitizer, and CUDA's memcheck with every block its own allocation, on two steps.

memcheck finds kernels that read freed storage; its racecheck is about shared memory inside a kernel, and finds nothing
of ours.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import torch

from refimpl.comm.group import Group
from refimpl.comm.streams import streams_of
from refimpl.gpu.part import Finding
from refimpl.gpu.twins import Twins
from refimpl.gpu.workload import STAGES, Workload


def run(device: torch.device, seconds: float) -> Iterator[Finding]:
    watched = {"TORCH_CUDA_SANITIZER": "1"} if device.type == "cuda" else {}
    yield _ran("torch's sanitizer, all stages", [], list(STAGES), device, 0.4 * seconds, watched)
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        yield Finding("compute-sanitizer", "not installed here")
    else:
        check = [tool, "--tool", "memcheck", "--error-exitcode", "9"]
        yield _ran("memcheck, zero3", check, ["zero3"], device, 0.5 * seconds, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def _ran(
    name: str, before: list[str], stages: list[str], device: torch.device, seconds: float, extra: dict[str, str]
) -> Finding:
    command = [*before, sys.executable, "-m", "refimpl.gpu.sanitizers", device.type, *stages]
    try:
        done = subprocess.run(command, env=os.environ | extra, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Finding(name, f"not done after {seconds:.0f} s: nothing is known")
    tail = (done.stdout + done.stderr).strip().splitlines()[-8:]
    return Finding(name, "clean" if done.returncode == 0 else tail, done.returncode == 0)


def two_steps(name: str, device: torch.device) -> None:
    """What is looked at: two steps of a stage among twins, on its own streams."""
    streams = streams_of(device)
    group = Group(None, device=device, streams=streams, transport=Twins(1, 4, streams, lambda: None))
    workload = Workload(width=64, layers=1)
    stage = workload.stage(name, group, check_order=False)
    for step in range(2):
        workload.step(stage, workload.batch(step, 1).to(device))


if __name__ == "__main__":
    for stage in sys.argv[2:]:
        two_steps(stage, torch.device(sys.argv[1]))
