"""Step time of each ZeRO stage beside its peers: the same GPT, the same batches, the same optimizer, the same ranks.

One heat is (parameters, dtype, ranks, stage): our stage, its peers and compute alone (see `peers.py`) take turns. The
batch is small, so that traffic shows: B = 1, T = 64 is 384 FLOP a parameter and step against 8 (DDP) to 12 (ZeRO-3)
bytes on the wire, half of that in bf16. That all contestants really do the same work is checked: after the same number
of steps their losses must agree.

What a step takes beyond compute alone is exposed: communication that nothing hides, copies, and the library's own code.
Compute alone updates every weight on every rank, so that what sharding saves of the update counts in a stage's favour.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from refimpl.bench.peers import ALONE, implementations, text_of
from refimpl.bench.race import Times, Turns, both_worlds, by_pages, medians, race
from refimpl.comm.group import Group
from refimpl.model.gpt import GPT, GPTConfig

STAGES = (0, 1, 2, 3)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Relative. Seen after 15 steps: 1e-6 in fp32, in bf16 4e-3, of losses that move by half. Without reduction: 0.3.
SAME_LOSS = {"fp32": 1e-4, "bf16": 5e-3}
HEAT = ("stage", "ranks", "parameters", "dtype")  # what all rows of a heat have in common


@dataclass(frozen=True)
class Workload:
    """What every contestant trains: a GPT of about `parameters`, on B x T random bytes a rank."""

    parameters: int = 10_000_000
    batch: int = 1
    context: int = 64
    turns: Turns = field(default_factory=Turns)
    dtype: str = "fp32"  # or "bf16": of weights, gradients and messages

    @property
    def gpt(self) -> GPTConfig:
        """About eight layers, a width that is a multiple of 64, 64 elements a head."""
        width = max(64, 64 * round((self.parameters / (8 * 12)) ** 0.5 / 64))
        layers = max(1, round(self.parameters / (12 * width**2)))
        return GPTConfig(vocab=256, context=self.context, width=width, layers=layers, heads=width // 64)


@dataclass(frozen=True)
class Row:
    """`step_ms`: median over steps of the slowest rank. `exposed_ms`: that, less compute alone on the same pages.

    Ratios are to the best peer, 0.5 is twice as fast: on the same pages (plain or huge), and of both worlds.
    """

    implementation: str
    stage: int
    ranks: int
    parameters: int
    dtype: str
    pages: str
    step_ms: float
    exposed_ms: float
    ratio_same_pages: float
    ratio_any_pages: float


@dataclass(frozen=True)
class Lap:
    """What one rank saw: times of the timed steps, and the losses of all steps, by contestant."""

    times: Times
    losses: dict[str, list[float]]


def heat(stage: int, workload: Workload, with_deepspeed: bool = True) -> Lap:
    """Runs on every rank: build all contestants of a stage, then race them."""
    group = Group.world()
    losses: dict[str, list[float]] = {}
    contestants: dict[str, Callable[[], None]] = {}
    text = text_of(group, workload.batch, workload.context)  # [B, T+1]
    for implementation in implementations(stage, with_deepspeed):
        torch.manual_seed(0)
        with group.device:  # a GPU draws 100M weights at once, the host in a second for each contestant
            model = GPT(workload.gpt)
        step = implementation.build(model, group, DTYPES[workload.dtype])
        losses[implementation.name] = []
        contestants[implementation.name] = recorded(
            partial(step, text[:, :-1], text[:, 1:]), losses[implementation.name]
        )
    return Lap(race(group, contestants, workload.turns), losses)


def recorded(step: Callable[[], torch.Tensor | None], losses: list[float]) -> Callable[[], None]:
    """The step; its loss is written down, on ranks that know it."""

    def call() -> None:
        if (loss := step()) is not None:
            losses.append(loss.item())

    return call


def check_same_work(laps: Sequence[Lap], same: float = SAME_LOSS["fp32"]) -> list[Times]:
    """Each rank's times. ValueError if, on any and after any step, a contestant's loss is not that of the others.

    Compute alone must agree as long as no gradient has met another rank's: in its first step.
    """
    for rank, lap in enumerate(laps):
        (first, expected), *others = lap.losses.items()
        for name, found in others:
            pairs = list(zip(expected, found, strict=True))
            for number, (a, b) in enumerate(pairs[:1] if name == ALONE else pairs):
                if not abs(a - b) <= same * abs(a):
                    raise ValueError(f"rank {rank}, step {number}: the loss is {a} with {first} and {b} with {name}")
    return [lap.times for lap in laps]


def measure(
    ranks: Sequence[int], workloads: Sequence[Workload], stages: Sequence[int] = STAGES, rounds: int = 1
) -> Iterator[list[Row]]:
    """The rows of one heat at a time. Every heat starts `rounds` worlds of plain and of huge pages."""
    for workload in workloads:
        for size in ranks:
            for stage in stages:
                worlds = both_worlds(heat, stage, workload, ranks=size, rounds=rounds)
                same = SAME_LOSS[workload.dtype]
                times = by_pages((pages, check_same_work(laps, same)) for pages, laps in worlds)
                yield rank_rows(times, stage, size, workload)


def rank_rows(times: Mapping[str, Times], stage: int, ranks: int, workload: Workload) -> list[Row]:
    """One row a contestant and kind of pages, in the order of `implementations`."""
    step_ms = medians(times)
    peers = [i.name for i in implementations(stage) if i.role == "peer"]
    best = {pages: min(ms[name] for name in peers if name in ms) for pages, ms in step_ms.items()}
    return [
        Row(
            implementation.name,
            stage,
            ranks,
            workload.gpt.parameters,
            workload.dtype,
            pages,
            ms[implementation.name],
            ms[implementation.name] - ms[ALONE],
            ms[implementation.name] / best[pages],
            ms[implementation.name] / min(best.values()),
        )
        for implementation in implementations(stage)
        for pages, ms in step_ms.items()
        if implementation.name in ms
    ]
