"""`refimpl doctor`: what this machine can run, and one line of advice for each thing it lacks."""

import importlib.util
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from refimpl import launch
from refimpl.bench.publish import cores
from refimpl.comm.group import Group
from refimpl.comm.link import VARIABLE
from refimpl.comm.route import meet
from refimpl.comm.shared import Shared
from refimpl.comm.throttled import Throttled
from refimpl.model.gpt import native_low_precision

GB, MB = 10**9, 10**6
DISK_BYTES = 128 * MB


@dataclass(frozen=True)
class Finding:
    """One thing of the machine. `advice` is empty when nothing is missing."""

    name: str
    state: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """Look at one thing after the other; the last three take a second or more."""
    yield Finding("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}")
    yield _cores()
    yield _memory()
    yield Finding("torch", f"{torch.__version__}, {torch.get_num_threads()} threads here, 1 in each rank")
    yield _gpus()
    yield _backends()
    yield _precision("bf16", torch.bfloat16)
    yield _precision("fp16", torch.float16)
    yield _triton()
    yield _disk()
    yield _tried("ranks", _ranks)
    yield _tried("transport", _transport)


def show(findings: Iterable[Finding]) -> None:
    """Print the findings as a table and the advice below it."""
    console = Console()
    table = Table("what", "here", title="refimpl doctor", title_justify="left")
    advice = []
    for finding in findings:
        mark = "[yellow]![/] " if finding.advice else "[green]✓[/] "
        table.add_row(mark + finding.name, finding.state)
        if finding.advice:
            advice.append(f"[bold]{finding.name}[/]: {finding.advice}")
    console.print(table)
    for line in advice:
        console.print(line, highlight=False)
    console.print("Next: [bold]refimpl demo[/]")


def _cores() -> Finding:
    few = "ranks take turns on one core: results stay exact, step times mean little; use a machine with 2 or more"
    return Finding("cores", f"{cores()}, {torch.backends.cpu.get_cpu_capability()}", few if cores() < 2 else "")


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    low = "the demo wants about 2 GB: close something, or pass --width 128" if memory.available < 2 * GB else ""
    return Finding("memory", f"{memory.available / GB:.1f} GB free of {memory.total / GB:.1f}", low)


def _gpus() -> Finding:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    none = "ranks run on the CPU over gloo, nothing to do; for NCCL use a machine with a GPU a rank and a CUDA torch"
    return Finding("GPUs", ", ".join(names) or "none", "" if names else none)


def _backends() -> Finding:
    there = {"gloo": dist.is_available() and dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    state = ", ".join(f"{name} {'yes' if found else 'no'}" for name, found in there.items())
    if not there["gloo"]:
        return Finding("backends", state, "this torch has no gloo: install a standard build of torch")
    lacks_nccl = torch.cuda.is_available() and not there["nccl"]
    return Finding("backends", state, "there are GPUs but no NCCL: install a CUDA build of torch" if lacks_nccl else "")


def _precision(name: str, dtype: torch.dtype) -> Finding:
    if native_low_precision(torch.device("cuda" if torch.cuda.is_available() else "cpu"), dtype):
        return Finding(name, "native matrix kernels")
    advice = f"{name} weights are stored and sent in 16 bits and multiplied in fp32, nothing to do"
    return Finding(name, "emulated: no native matrix kernels", advice)


def _triton() -> Finding:
    """Which kernels norms, loss and AdamW are computed by: see refimpl/kernels/language.py, `takes`."""
    if importlib.util.find_spec("triton") is None:
        return Finding("triton", "missing: torch's operators do all", "on Linux: pip install -e '.[kernels]'")
    if torch.cuda.is_available():
        return Finding("triton", "kernels compiled for the GPU; tensors on the CPU take torch's operators")
    advice = (
        "nothing to do; with TRITON_INTERPRET=1 refimpl.kernels interprets its kernels, slowly, to read and test them"
    )
    return Finding("triton", "torch's operators do all: no GPU to compile kernels for", advice)


def _disk() -> Finding:
    """Write and read one file in the temporary folder, without the page cache where the system can drop it."""
    block = os.urandom(4 * MB)
    with tempfile.NamedTemporaryFile(prefix="refimpl-doctor-") as file:
        begun = time.perf_counter()
        for _ in range(DISK_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        while file.read(len(block)):
            pass
        speeds = [DISK_BYTES / (t1 - t0) / GB for t0, t1 in ((begun, written), (written, time.perf_counter()))]
        folder = Path(file.name).parent
    state = f"{folder}: write {speeds[0]:.2f} GB/s, read {speeds[1]:.2f} GB/s"
    slow = "offloading to disk will be slow here: point TMPDIR at a local disk" if min(speeds) < 0.1 else ""
    return Finding("disk", state, slow)


def _tried(name: str, look: Callable[[], Finding]) -> Finding:
    """What is found with ranks, or why one of them failed."""
    try:
        return look()
    except launch.RankError as error:
        return Finding(name, "fails", str(error).splitlines()[0])


def _nothing() -> None:
    """What a rank does when only its start is of interest."""


def _how() -> tuple[bool, str]:
    """On a rank: whether it shares memory with its peers, and why it could not."""
    group = Group.world()
    assert group.handle is not None
    found = meet(group.handle)
    way = group.transport.way if isinstance(group.transport, Throttled) else group.transport
    return isinstance(way, Shared), found if isinstance(found, str) else ""


def _transport() -> Finding:
    [(shares, why), _] = launch.run(_how, ranks=2, device="cpu")
    said = os.environ.get("REFIMPL_TRANSPORT")
    state = ("shared memory" if shares else "gloo over TCP") + (f" (REFIMPL_TRANSPORT={said})" if said else "")
    if link := os.environ.get(VARIABLE):
        state += f", behind a slow link ({VARIABLE}={link})"
    return Finding(
        "transport", f"{state} between the ranks of this host", f"slower than shared memory: {why}" if why else ""
    )


def _ranks() -> Finding:
    seconds = []
    for _ in range(2):
        begun = time.perf_counter()
        launch.run(_nothing, ranks=2, device="cpu")
        seconds.append(time.perf_counter() - begun)
    return Finding("ranks", f"2 processes start in {seconds[0]:.1f} s the first time, {seconds[1]:.1f} s after that")
