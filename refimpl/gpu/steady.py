"""Part 5: a warm step asks the device for few values and keeps its memory.

Eight ranks are pretended, so that shards have the size they would have. What arrives is this rank's own: torch's
"fake" backend would leave what was in memory, and where that is no number a step is skipped, and waits once more.
"""

import gc
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from refimpl.comm.collectives import Op
from refimpl.comm.group import Group
from refimpl.comm.streams import streams_of
from refimpl.comm.work import Steps
from refimpl.gpu.part import Finding
from refimpl.gpu.twins import Twins
from refimpl.gpu.workload import STAGES, Workload
from refimpl.plan.formulas import Strategy, layout_of, memory_bytes
from refimpl.zero.stage import Stage

SYNCS = 1  # as tests/zero/test_event_order.py counts them without a GPU
WARM, STEPS = 3, 10


class Still(Twins):
    """Twins that take no memory for what they send: their sum is this rank's, so many times."""

    def all_reduce(self, x: Tensor, op: Op) -> Steps:
        if op == "sum":
            x.mul_(self.size)
        yield from ()

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op) -> Steps:
        if (mine := x.view(self.size, -1)[self.rank]).data_ptr() != out.data_ptr():
            out.copy_(mine)
        if op == "sum":
            out.mul_(self.size)
        yield from ()

    def all_gather(self, chunks: list[Tensor], x: Tensor) -> Steps:
        for chunk in chunks:
            if chunk.data_ptr() != x.data_ptr():
                chunk.copy_(x)
        yield from ()

    def broadcast(self, x: Tensor, root: int) -> Steps:
        yield from ()


def run(device: torch.device, seconds: float) -> Iterator[Finding]:
    workload = Workload(width=64, layers=2) if device.type == "cpu" else Workload(width=512, layers=8)
    strategies: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "zero3")
    assert list(strategies) == list(STAGES)
    for name in strategies:
        streams = streams_of(device)
        still = Still(3, 8, streams, lambda: None)
        stage = workload.stage(name, Group(None, device=device, streams=streams, transport=still), check_order=False)
        texts = [workload.batch(step, 3).to(device) for step in range(WARM + STEPS + 1)]
        for text in texts[:WARM]:
            workload.step(stage, text)
        formula = sum(memory_bytes(name, 8, workload.dtype.itemsize, layout_of(stage)).values())
        if device.type == "cuda":
            yield from on_gpu(name, workload, stage, texts[WARM:], formula)
        else:
            for text in texts[WARM:]:
                workload.step(stage, text)
            yield Finding(f"{name}: kept by the formula, MB", formula / 1e6)
        yield Finding(f"{name}: steps skipped", stage.skipped_steps, stage.skipped_steps == 0)
        del stage
        gc.collect()  # or what a cycle keeps of it counts among the next one's


def on_gpu(name: str, workload: Workload, stage: Stage, texts: list[torch.Tensor], formula: int) -> Iterator[Finding]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        workload.step(stage, texts[0])
        torch.cuda.set_sync_debug_mode("default")
    syncs = waits_among(told)
    yield Finding(f"{name}: host synchronisations in a step", {"count": len(syncs), "at": syncs}, len(syncs) <= SYNCS)
    torch.cuda.reset_peak_memory_stats()
    before, retries = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["num_alloc_retries"]
    for text in texts[1:]:
        workload.step(stage, text)
    grown = torch.cuda.memory_allocated() - before
    yield Finding(f"{name}: bytes kept more after {STEPS} steps", grown, grown <= 0)
    retries = torch.cuda.memory_stats()["num_alloc_retries"] - retries
    yield Finding(f"{name}: retries of the allocator", retries, retries == 0)
    peak = torch.cuda.max_memory_allocated()
    sizes = {"kept by the formula": formula / 1e6, "allocated between steps": before / 1e6, "at the peak": peak / 1e6}
    yield Finding(f"{name}: MB, N=8", sizes)


def waits_among(told: list[warnings.WarningMessage]) -> list[str]:
    """Where the host waited. torch also warns, once, that this mode does not see all "synchronizing operations"."""
    waits = [w for w in told if "called a synchronizing CUDA operation" in str(w.message)]
    return [f"{w.filename.split('/')[-1]}:{w.lineno}" for w in waits]
