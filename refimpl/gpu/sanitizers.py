"""Part 4: torch's own stream sanitizer, and CUDA's memcheck with every block its own allocation, on two steps.

memcheck finds kernels that read freed storage; its racecheck is about shared memory inside a kernel, and finds nothing
of ours. What CUDA's functions answer is torch's business: it asks for what there may not be, as a current context.
"""

import os
import re
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

TOOLKIT = "/usr/local/cuda/bin"  # where it is, if nobody has put it on the PATH
SUMMARY = re.compile(r"ERROR SUMMARY: ([1-9]\d*) error")  # the last thing that memcheck says, where there are some
ITS_OWN = "Internal Sanitizer Error"  # as on a GPU that is newer than it, or where a container keeps it from looking


def run(device: torch.device, seconds: float) -> Iterator[Finding]:
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), TOOLKIT]))
    watched, share = {"TORCH_CUDA_SANITIZER": "1"} if device.type == "cuda" else {}, 0.4 if tool else 0.9
    yield _ran("torch's sanitizer, all stages", [], list(STAGES), device, share * seconds, watched)
    if tool is None:
        yield Finding("compute-sanitizer", "not installed here")
    else:
        # It waits 10 seconds for a program's first call of CUDA; torch alone may take as long to be imported.
        check = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--launch-timeout", "0"]
        check += ["--error-exitcode", "9"]
        yield _ran("memcheck, zero3", check, ["zero3"], device, 0.5 * seconds, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def _ran(
    name: str, before: list[str], stages: list[str], device: torch.device, seconds: float, extra: dict[str, str]
) -> Finding:
    """How the two steps ended. `before`: a tool that runs them.

    Where it found nothing in steps that failed it could not begin, or had too little memory: nothing is known of them.
    """
    command = [*before, sys.executable, "-m", "refimpl.gpu.sanitizers", device.type, *stages]
    try:
        done = subprocess.run(command, env=os.environ | extra, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Finding(name, f"not done after {seconds:.0f} s: nothing is known")
    if done.returncode == 0:
        return Finding(name, "clean", True)
    said = done.stdout + done.stderr
    last = said.strip().splitlines()[-8:]
    if before and (ITS_OWN in said or not SUMMARY.search(said)):
        return Finding(name, ["it does not work here, so nothing is known:", *last])
    return Finding(name, last, False)


def two_steps(name: str, device: torch.device) -> None:
    """What is looked at: two steps of a stage among twins, on its own streams."""
    streams = streams_of(device)
    group = Group(None, device=device, streams=streams, transport=Twins(1, 4, streams, lambda: None))
    workload = Workload(width=128, layers=1)  # as wide as the race hunt's, whose kernels are compiled already
    stage = workload.stage(name, group, check_order=False)
    for step in range(2):
        workload.step(stage, workload.batch(step, 1).to(device))


if __name__ == "__main__":
    for stage in sys.argv[2:]:
        two_steps(stage, torch.device(sys.argv[1]))
