"""How long training stands still for a save: synchronous, asynchronous, and beside them the copy alone.

A save is AdamW's 12 bytes a parameter, of which each of N ranks writes 1/N, with a checksum, fsync included. An
asynchronous one stops training for the copy to host memory and some messages; the writing goes on beside the steps,
takes their cores and memory bandwidth, and is over after `written_ms`. The contestants take turns on the same ranks,
disk and state. The copy alone is the least that an asynchronous save can take. torch.save of the same shards, without a
checksum and without fsync, stands beside them: what a script without a library does.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from refimpl.bench.peers import text_of
from refimpl.bench.race import Times, Turns, race, slowest
from refimpl.bench.zero import Workload
from refimpl.checkpoint.tensors import brought
from refimpl.comm.group import Group
from refimpl.engine.engine import Engine
from refimpl.engine.initialize import initialize
from refimpl.launch import run
from refimpl.model.gpt import GPT
from refimpl.zero.portable import parts

HEAT = ("stage", "ranks", "parameters")
SYNCHRONOUS, ASYNCHRONOUS, COPY, TORCH = "synchronous", "asynchronous", "the copy alone", "torch.save"


@dataclass(frozen=True)
class Row:
    """`blocked_ms`: until training may go on, median of the slowest rank. `written_ms`: until all is on the disk."""

    save: str
    stage: int
    ranks: int
    parameters: int
    blocked_ms: float
    written_ms: float
    blocked_of_synchronous: float


def heat(stage: int, parameters: int, folder: str, turns: Turns) -> Times:
    """Runs on every rank: one engine, saved in turns; times until training may go on, and until all is written."""
    group = Group.world()
    zero = {"stage": stage}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    engine = initialize(model=GPT(Workload(parameters).gpt), config=config)[0]
    tokens = text_of(group, 1, 63)
    engine.backward(engine(tokens, tokens))
    engine.step()
    times: Times = {}
    for name, save in contestants(engine, Path(folder)).items():  # one contestant's writing must not be another's wait
        blocked = race(group, {name: save, f"{name}, written": engine.wait_for_checkpoint}, turns)
        times |= blocked
    return times


def contestants(engine: Engine, folder: Path) -> dict[str, Callable[[], object]]:
    """Ways to save the same state."""

    def shards() -> dict[str, torch.Tensor]:
        each = ((p.name, {"w": p.weight, **p.state}) for p in parts(engine.stage))
        return {f"{key}/{name}": brought(tensor) for name, held in each for key, tensor in held.items()}

    path = folder / f"rank{engine.group.rank}.pt"
    return {
        SYNCHRONOUS: lambda: engine.save_checkpoint(folder, "sync", asynchronous=False),
        ASYNCHRONOUS: lambda: engine.save_checkpoint(folder, "async", asynchronous=True),
        COPY: lambda: {name: t.to("cpu", copy=True) for name, t in shards().items()},
        TORCH: lambda: torch.save({name: t.clone() for name, t in shards().items()}, path),
    }


def measure(
    ranks: Sequence[int], parameters: Sequence[int], stages: Sequence[int], turns: Turns, folder: Path | None = None
) -> Iterator[list[Row]]:
    """The rows of one heat (stage, ranks, parameters) at a time. `folder`: on the disk to measure."""
    for count in ranks:
        for size in parameters:
            for stage in stages:
                with tempfile.TemporaryDirectory(dir=folder, prefix="bench-checkpoint-") as place:
                    times = slowest(run(heat, stage, size, place, turns, ranks=count, timeout=600))
                yield rows(times, stage, count, Workload(size).gpt.parameters)


def rows(times: Times, stage: int, ranks: int, parameters: int) -> list[Row]:
    """A row a way to save."""
    base = median(times[SYNCHRONOUS])
    found = []
    for name in (SYNCHRONOUS, ASYNCHRONOUS, COPY, TORCH):
        blocked = median(times[name])
        written = median(a + b for a, b in zip(times[name], times[f"{name}, written"], strict=True))
        found.append(Row(name, stage, ranks, parameters, blocked, written, blocked / base))
    return found
