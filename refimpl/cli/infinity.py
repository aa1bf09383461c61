"""`refimpl demo --infinity`: a model whose training does not fit, trained all the same, with its state on a disk.

Every rank gets a limit that the operating system enforces (RLIMIT_DATA: private memory beyond what the process has when
training begins): 4 bytes a parameter, what the weights alone weigh, where AdamW in fp32 needs 16. Four ways are tried:
DDP, ZeRO-2, ZeRO-3, and ZeRO-3 with optimizer state, gradients and parameters on a disk. The first three die of it,
each with its own allocation that the kernel refused. The last one's step is limited by its disk: 12 bytes read and 12
written of each parameter a rank owns for AdamW, 4 written and 4 read of its gradient, 4 read for forward, 4 for
backward and 4 written of the weights. After Rajbhandari et al. 2021, arXiv:2104.07857. The ranks talk over gloo here:
memory that ranks share belongs to no process's limit.
"""

import re
import resource
import shutil
import threading
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from refimpl import launch
from refimpl.bench.disk import Row as DiskRow
from refimpl.bench.disk import measure as measure_disk
from refimpl.bench.written import write_json, writing
from refimpl.cli import options
from refimpl.cli.train import STAGES, Task
from refimpl.comm.group import Group
from refimpl.launch import RankError
from refimpl.measure.memory import MemoryMeter
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.offload.homes import Disk
from refimpl.ranks import environment
from refimpl.ranks.allocator import give_freed_memory_back
from refimpl.zero.config import ZeroConfig
from refimpl.zero.init import Init

WAYS = {"DDP": "ddp", "ZeRO-2": "zero2", "ZeRO-3": "zero3", "ZeRO-3, all on disk": "zero3"}
MODEL = GPTConfig(width=512, layers=18, heads=8, context=64)  # 57 million parameters
NEEDED, ALLOWED = 16, 4.0  # bytes a parameter: AdamW in fp32 needs 16
ON_DISK = 20  # bytes a parameter: 4 weights, 4 gradients, 12 masters and state
SUB_GROUP = 1 << 20  # elements updated at a time: 12 MB
MB = 10**6
DISK_BYTES = 300 * MB  # read and written to see what the disk can do


@dataclass(frozen=True)
class Lived:
    """What rank 0 saw of one way. Bytes are its own, between backward and step of the last step."""

    way: str
    died_of: str = ""
    loss: float = float("nan")
    memory: dict[str, int] = field(default_factory=dict)  # by class
    on_disk: int = 0
    moved: int = 0  # bytes read and written a step
    step_s: float = float("nan")  # median but for the first


def live(way: str, folder: Path, limit: int, steps: int) -> Lived:
    """Runs on every rank, within `limit` bytes of private memory."""
    torch.set_num_threads(1)
    threading.stack_size(1 << 20)  # of the threads that wait for the disk: theirs count too
    give_freed_memory_back()  # the limit then counts what is in use
    group, disk = Group.world(transport="gloo"), Disk(folder) if "disk" in way else None
    task = Task(MODEL, corpus(), steps, batch=2)
    limit_memory(limit)
    torch.manual_seed(0)
    with Init(group, enabled=WAYS[way] == "zero3"):
        model = GPT(task.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, fused=True)
    config = ZeroConfig(
        optimizer_home=disk,
        gradient_home=disk,
        parameter_home=disk,
        sub_group_size=SUB_GROUP,
        reduce_bucket_size=SUB_GROUP,
    )
    stage = STAGES[WAYS[way]](model, optimizer, group, config)  # type: ignore[index]
    batches, meter = Batches(task.text, task.model.context, task.batch, task.seed), MemoryMeter(stage.tensors)
    seconds, moved, loss, memory = [], 0, torch.zeros(()), dict[str, int]()
    for step in range(steps):
        begun, before = time.perf_counter(), disk.file.moved_bytes if disk else 0
        loss = model(*batches.batch(step, group.rank, group.device))
        stage.backward(loss)
        memory = {name: size for name, size in meter.now().items() if size}
        stage.step()
        seconds.append(time.perf_counter() - begun)
        moved = disk.file.moved_bytes - before if disk else 0
        launch.report(way)
    return Lived(way, "", loss.item(), memory, disk.file.end if disk else 0, moved, median(seconds[1:] or seconds))


def limit_memory(more: int) -> None:
    """Let this process have so many bytes of private memory more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def asked(ranks: int | None, folder: Path, out: Path, given: Collection[str]) -> tuple[int, Path, Path]:
    """Check what was asked for; `given`: the options on the command line. ValueError names one, and what would do."""
    if others := [option for option in given if option not in ("infinity", "ranks", "folder", "out")]:
        raise ValueError(f"--{others[0]}: --infinity trains its own model; it takes --ranks, --folder and --out alone")
    if place := environment.find():
        raise ValueError(f"--infinity starts its own ranks, with a limit on each: run it without {place.launcher}")
    count = options.ranks_asked(ranks)
    out = out if "out" in given else Path("out/infinity")
    options.check_memory(options.RANK_BYTES + int(ALLOWED * MODEL.parameters), count)
    for option, place_on_disk in {"folder": folder, "out": out}.items():
        options.check_writable(option, place_on_disk)
    needed, free = ON_DISK * MODEL.parameters, shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"--folder {folder}: {needed / MB:,.0f} MB go there, and {free / MB:,.0f} MB are free: free some, or name "
            "a folder on another disk"
        )
    return count, folder, out


def run(ranks: int, steps: int, folder: Path, out: Path) -> int:
    """Try every way, print what became of it, write the report. Exit status: 0 if only the last one lived."""
    folder.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    n, console = MODEL.parameters, Console()
    limit = int(ALLOWED * n)
    console.print(
        f"{n / MB:.0f} million parameters need {NEEDED * n / MB:.0f} MB with AdamW in fp32; each of {ranks} ranks "
        f"may have {limit / MB:.0f} MB of memory."
    )
    lived = []
    for way in WAYS:
        with console.status(f"{way} ..."):
            lived.append(tried(way, ranks, folder, limit, steps))
        console.print(f"{way}: {lived[-1].died_of or f'finished, loss {lived[-1].loss:.2f}'}", highlight=False)
    with console.status("the disk alone ..."):
        raw = [row for heat in measure_disk(folder, DISK_BYTES, 1) for row in heat]
    fastest = max(row.MB_per_s for row in raw if row.who == "plain" and row.direction == "both")
    console.print(tabulated(lived, limit, ranks, fastest))
    report(out, lived, limit, ranks, raw)
    with writing(out / "infinity.png"):
        draw(out / "infinity.png", lived, limit, ranks)
    console.print(f"{out / 'report.json'}\n{out / 'infinity.png'}")
    return 0 if [bool(one.died_of) for one in lived] == [True, True, True, False] else 1


def tried(way: str, ranks: int, folder: Path, limit: int, steps: int) -> Lived:
    """What rank 0 saw, or what the first rank died of."""
    try:
        return launch.run(live, way, folder, limit, steps, ranks=ranks, device="cpu", timeout=120)[0]
    except RankError as error:
        return Lived(way, died_of=in_one_line(str(error)))


def in_one_line(error: str) -> str:
    """What an allocation that the kernel refused looks like, in words."""
    asked = re.search(r"rank (\d+).*?tried to allocate (\d+) bytes", error, re.DOTALL)
    if asked:
        return f"dies: rank {asked[1]} asked for {int(asked[2]) / MB:,.1f} MB more, and the system refused"
    if re.search(r"MemoryError|bad_alloc|Cannot allocate memory|can't start new thread", error):
        return f"dies: {error.splitlines()[0]}"
    raise RuntimeError(error)


def tabulated(lived: list[Lived], limit: int, ranks: int, fastest: float) -> Table:
    """`fastest`: MB/s that the disk has been seen to read and write at once, shared by the ranks."""
    n = MODEL.parameters
    table = Table(title=f"Bytes a parameter on rank 0 (limit {limit / n:.1f}), between backward and step")
    for column in ("way", "outcome", "in memory", "on disk", "moved a step", "step s", "disk's own limit s"):
        table.add_column(column, justify="left" if column in ("way", "outcome") else "right")
    for one in lived:
        if one.died_of:
            table.add_row(one.way, "dies", *[""] * 5)
            continue
        a_parameter = [sum(one.memory.values()) / n, one.on_disk / n, one.moved / n]
        seconds = [one.step_s, one.moved * ranks / MB / fastest]
        table.add_row(one.way, "finishes", *(f"{x:.2f}" for x in a_parameter), *(f"{s:.1f}" for s in seconds))
    return table


def report(out: Path, lived: list[Lived], limit: int, ranks: int, disk: list[DiskRow]) -> None:
    """Everything, as JSON."""
    found: dict[str, Any] = {
        "parameters": MODEL.parameters,
        "ranks": ranks,
        "limit_bytes": limit,
        "ways": [asdict(one) for one in lived],
        "disk": [asdict(row) for row in disk],
    }
    write_json(out / "report.json", found)


def draw(file: Path, lived: list[Lived], limit: int, ranks: int) -> None:
    """How many bytes of what were where, beside the limit."""
    from matplotlib.figure import Figure

    n = MODEL.parameters
    needs = {"DDP": 16, "ZeRO-2": 4 + 12 / ranks, "ZeRO-3": 16 / ranks}  # the formulas of `refimpl.plan`
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    names = list(WAYS)
    for y, one in enumerate(lived):
        if one.died_of:
            axes.barh(y, needs.get(one.way, 0), color="none", edgecolor="tab:red", linestyle="--")
            continue
        left = 0.0
        seen = {name: size for name, size in one.memory.items() if size > limit / 1000}
        for name, size in [*seen.items(), ("on disk", one.on_disk)]:
            axes.barh(y, size / n, left=left, label=name, hatch="//" if name == "on disk" else None)
            left += size / n
    axes.axvline(limit / n, color="tab:red")
    axes.text(limit / n, -0.7, " the system's limit", color="tab:red", va="center")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("bytes a parameter on one rank (dashed: what it died of needing)")
    if not lived[-1].died_of:
        axes.legend(fontsize=7, loc="lower right")
    figure.savefig(file, dpi=150)
