"""Part 1: NCCL with one rank, on the very path that many ranks take; how many parameters lie aligned; several ranks."""

import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from refimpl import launch
from refimpl.comm.group import Group
from refimpl.gpu import several
from refimpl.gpu.part import Finding
from refimpl.zero.ddp import DDP
from refimpl.zero.init import GatheredParameters
from refimpl.zero.zero3 import Zero3

ALIGNED = 16  # bytes that cuBLAS and vectorised kernels want


def run(device: torch.device, seconds: float) -> Iterator[Finding]:
    [found] = launch.run(collectives, ranks=1, device=device.type, timeout=seconds / 2)
    for name, passed in found.items():
        yield Finding(f"one rank, {name}", passed, passed)
    if device.type == "cuda":
        lacking = launcher_lacks()
        yield Finding("Triton can compile what launches its kernels", lacking or "yes", not lacking)
    for kind in (DDP, Zero3):
        odd = nn.Sequential(nn.Linear(64, 63), nn.Linear(63, 65), nn.Linear(65, 64)).to(device)
        kind(odd, torch.optim.AdamW(odd.parameters()), Group(None, device=device))
        with GatheredParameters(odd):
            unaligned = [name for name, p in odd.named_parameters() if p.data_ptr() % ALIGNED]
        yield Finding(f"{kind.__name__}: of 6 odd parameters, not on {ALIGNED} bytes", unaligned or "none")
    ranks = max(2, torch.cuda.device_count()) if device.type == "cuda" else 2
    ways = launch.run(several.found, ranks=ranks, device=device.type, timeout=seconds)
    for name in ways[0]:
        wrong = {f"rank {rank}": said[name] for rank, said in enumerate(ways) if said[name]}
        yield Finding(f"{ranks} ranks, {name}", wrong or "right", not wrong)


def launcher_lacks() -> str:
    """What is missing of what Triton makes a kernel's launcher with, at the first launch, and how to get it."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiler or shutil.which(compiler) is None:
        return "no C compiler: install gcc, or name one in the environment variable CC"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton asks; a Python that was
    header = Path(sysconfig.get_path("include", scheme)) / "Python.h"  # moved remembers in INCLUDEPY where it was built
    return "" if header.exists() else f"no {header}: install Python's headers (Debian, Ubuntu: python3-dev)"


def collectives() -> dict[str, bool]:
    """Each collective of a group of one rank leaves what it was given, on the library and on a stream of its own."""
    group = Group.world()
    x = torch.arange(1.0, 65.0, device=group.device)
    expected, found = x.clone(), {}
    for op in ("sum", "mean", "max"):
        y = x.clone()
        group.all_reduce(y, op, async_op=True).wait()
        found[f"all_reduce {op}"] = torch.equal(y, expected)
        out = torch.full_like(x, float("nan"))
        group.reduce_scatter(out, x, op, async_op=True).wait()
        found[f"reduce_scatter {op}"] = torch.equal(out, expected)
    out = torch.full_like(x, float("nan"))
    group.all_gather(out, x, async_op=True).wait()
    found["all_gather"] = torch.equal(out, expected)
    group.broadcast(out, async_op=True).wait()
    found["broadcast"] = torch.equal(out, expected)
    group.barrier()
    found["objects"] = group.all_gather_object("here") == ["here"]
    on_gpu = group.device.type == "cuda"
    found["on a stream of its own"] = (group.transport.lane is not None) == on_gpu
    found["by its own library"] = group.backend == ("nccl" if on_gpu else "gloo")
    return found
