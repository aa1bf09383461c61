"""A step with each home of the state beside a plain one: the same GPT, batches, optimizer and ranks, taking turns.

    plain                        everything in memory
    Host                         masters and optimizer state in host memory (on a CPU: a second copy of the weights)
    Disk: optimizer              on a disk, 12 bytes a parameter each way with AdamW, divided by N
    Disk: optimizer, late        the same one step late, beside forward and backward: see `DelayedUpdate`
    Disk: optimizer, gradients   the shards of gradients wait there too (from ZeRO-2 on): 4 bytes more each way
    Disk: all                    parameters too (ZeRO-3): 4 more for forward, 4 for backward, 4 written back
    DeepSpeed: cpu, nvme         its own offload of the optimizer on the same disk, where it is installed with its aio
    AdamW alone: torch           no step: torch's fused AdamW over as many elements as a rank owns
    AdamW alone: Host            the same over what rests at the host, in the parts of a step

Losses must agree, but for what is one step late. Bytes are counted, times are ratios to the plain step of the same run,
of AdamW alone to torch's.
"""

import importlib
import importlib.util
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from refimpl.bench.peers import STAGES, adamw, engine_step, excuse_deprecated_collectives, text_of
from refimpl.bench.race import Times, race, slowest
from refimpl.bench.zero import SAME_LOSS, Lap, Workload, check_same_work, recorded
from refimpl.comm.group import Group
from refimpl.launch import run
from refimpl.measure.memory import MemoryMeter
from refimpl.model.gpt import GPT, Block
from refimpl.offload.homes import Disk, Host
from refimpl.zero.config import ZeroConfig
from refimpl.zero.offload.offloaded import OffloadedUpdate
from refimpl.zero.stage import Stage

HEAT = ("stage", "ranks", "parameters")
PLAIN, LATE, HOST = "plain", "Disk: optimizer, late", "Host"
ADAMW, ADAMW_AT_HOST = "AdamW alone: torch", "AdamW alone: Host"
SUB_GROUP = 1 << 18  # elements updated at a time


@dataclass(frozen=True)
class Row:
    """`step_ms`: median of the slowest rank. Memory and disk: rank 0's bytes a parameter; moved: read and written.

    Of AdamW alone `of_plain` is of torch's.
    """

    home: str
    stage: int
    ranks: int
    parameters: int
    step_ms: float
    of_plain: float
    in_memory: float
    moved: float


@dataclass(frozen=True)
class Found:
    """What one rank saw: its lap, bytes that its stages held after a step, bytes a step moved over the disk."""

    lap: Lap
    memory: dict[str, int]
    moved: dict[str, int]


def homes(stage: int, folder: Path) -> dict[str, ZeroConfig]:
    """The contestants of a stage."""
    plain = ZeroConfig(leaf_modules=(Block,), sub_group_size=SUB_GROUP)
    disk = replace(plain, optimizer_home=Disk(folder))
    host = replace(plain, optimizer_home=Host(), sub_group_size=ZeroConfig.sub_group_size)  # it saves no memory there
    found = {PLAIN: plain, HOST: host, "Disk: optimizer": disk}
    found[LATE] = replace(plain, optimizer_home=Disk(folder), delayed_update=True)
    if stage >= 2:
        both = Disk(folder)
        found["Disk: optimizer, gradients"] = replace(plain, optimizer_home=both, gradient_home=both)
    if stage == 3:
        every = Disk(folder)
        found["Disk: all"] = replace(plain, optimizer_home=every, gradient_home=every, parameter_home=every)
    return found


def heat(stage: int, workload: Workload, folder: Path) -> Found:
    """Runs on every rank: build a model for each home, then race them."""
    group = Group.world()
    text = text_of(group, workload.batch, workload.context)
    losses: dict[str, list[float]] = {}
    contestants: dict[str, Callable[[], None]] = {}
    disks: dict[str, Disk] = {}
    stages: dict[str, Stage] = {}
    for name, config in homes(stage, folder).items():
        torch.manual_seed(0)
        model = GPT(workload.gpt).to(group.device)
        stages[name] = STAGES[stage](model, adamw(model.parameters()), group, config)
        if isinstance(config.optimizer_home, Disk):
            disks[name] = config.optimizer_home
        step = partial(engine_step(model, stages[name]), text[:, :-1], text[:, 1:])
        contestants[name] = recorded(step, losses.setdefault(name, []))
    for device in ("cpu", "nvme") if stage else ():
        if (peer := deepspeed(stage, workload, text, device, folder)) is not None:
            contestants[f"DeepSpeed: {device}"] = recorded(peer, losses.setdefault(f"DeepSpeed: {device}", []))
    times = race(group, contestants, workload.turns)
    before = {name: disk.file.moved_bytes for name, disk in disks.items()}
    for name, contestant in contestants.items():
        contestant()
        if name in stages:
            stages[name].catch_up()
    moved = {name: disk.file.moved_bytes - before[name] for name, disk in disks.items()}
    memory = {name: sum(MemoryMeter(one.tensors).now().values()) for name, one in stages.items()}
    times |= race(group, updates(stages[HOST]), workload.turns)
    return Found(Lap(times, losses), memory, moved)


def updates(stage: Stage) -> dict[str, Callable[[], object]]:
    """AdamW alone, over what this rank owns."""
    update = stage.update
    assert isinstance(update, OffloadedUpdate)
    parts, slices, settings = update.parts, update.slices, update.slices.settings()
    for part in parts:
        grad = torch.full((part.end - part.start,), 1e-3)
        slices.hand_out(part.bucket, grad, 1.0, set(), part.start, part.end)
    whole = torch.zeros(sum(part.end - part.start for part in parts), requires_grad=True)
    whole.grad = torch.full_like(whole, 1e-3)

    def by_parts() -> None:
        for part in parts:
            slices.step_inside(part.bucket, part.start, part.end, settings)

    return {ADAMW: adamw([whole]).step, ADAMW_AT_HOST: by_parts}


def deepspeed(
    stage: int, workload: Workload, text: torch.Tensor, device: str, folder: Path
) -> Callable[[], torch.Tensor] | None:
    """DeepSpeed's step; None where it, or the operation that this needs, is not there (said in a warning)."""
    found = importlib.util.find_spec("deepspeed")
    if found is None or found.origin is None or (device == "nvme" and stage < 3):
        return None
    excuse_deprecated_collectives()
    library: Any = importlib.import_module("deepspeed")
    builder = importlib.import_module("deepspeed.ops.op_builder")
    needed = [builder.CPUAdamBuilder, *([builder.AsyncIOBuilder] if device == "nvme" else [])]
    if missing := [op.NAME for op in needed if not op().is_compatible(verbose=False)]:
        warnings.warn(f"DeepSpeed: {device} is left out: {', '.join(missing)} cannot be built here", stacklevel=2)
        return None
    torch.manual_seed(0)
    model = GPT(workload.gpt)
    home = {"device": device, **({"nvme_path": str(folder)} if device == "nvme" else {})}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "offload_optimizer": home, "sub_group_size": SUB_GROUP},
    }
    optimizer = library.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-4)
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return partial(engine_step(engine, engine), text[:, :-1], text[:, 1:])


def measure(
    ranks: Sequence[int], workloads: Sequence[Workload], stages: Sequence[int], folder: Path | None = None
) -> Iterator[list[Row]]:
    """The rows of one heat (stage, ranks, parameters) at a time. `folder`: on the disk to measure."""
    for workload in workloads:
        for size in ranks:
            for stage in stages:
                with tempfile.TemporaryDirectory(dir=folder, prefix="bench-offload-") as place:
                    found = run(heat, stage, workload, Path(place), ranks=size, timeout=600)
                on_time = [{k: v for k, v in one.lap.losses.items() if k != LATE} for one in found]
                check_same_work([Lap({}, losses) for losses in on_time], SAME_LOSS["fp32"])
                yield rows(slowest([one.lap.times for one in found]), found[0], stage, size, workload)


def rows(times: Times, rank0: Found, stage: int, ranks: int, workload: Workload) -> list[Row]:
    """A row a home."""
    n, plain, alone = workload.gpt.parameters, median(times[PLAIN]), median(times[ADAMW])
    return [
        Row(
            name, stage, ranks, n, median(steps), median(steps) / (alone if name in (ADAMW, ADAMW_AT_HOST) else plain),
            rank0.memory.get(name, 0) / n or float("nan"), rank0.moved.get(name, 0) / n,
        )
        for name, steps in times.items()
    ]  # fmt: skip
