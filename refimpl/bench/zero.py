"""Step time of each ZeRO stage beside its peers: the same GPT, the same batches, the same optimizer, the same ranks.

One heat is (parameters, ranks, stage): our stage and its peers (see `peers.py`) take turns. The batch is small, so
that traffic shows: B = 1, T = 64 is 384 FLOP a parameter and step against 8 (DDP) to 12 (ZeRO-3) bytes on the wire.
That all contestants really do the same work is checked: after the same number of steps their losses must agree.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from refimpl.bench.peers import Step, implementations
from refimpl.bench.race import Times, Turns, both_worlds, race, slowest
from refimpl.comm.group import Group
from refimpl.model.gpt import GPT, GPTConfig

STAGES = (0, 1, 2, 3)
SAME_LOSS = 1e-4  # relative; sums in another order were seen to change the loss by 1e-6 after ten AdamW steps


@dataclass(frozen=True)
class Workload:
    """What every contestant trains: a GPT of about `parameters`, on B x T random bytes a rank."""

    parameters: int = 10_000_000
    batch: int = 1
    context: int = 64
    turns: Turns = field(default_factory=Turns)

    @property
    def gpt(self) -> GPTConfig:
        """About eight layers, a width that is a multiple of 64, 64 elements a head."""
        width = max(64, 64 * round((self.parameters / (8 * 12)) ** 0.5 / 64))
        layers = max(1, round(self.parameters / (12 * width**2)))
        return GPTConfig(vocab=256, context=self.context, width=width, layers=layers, heads=width // 64)


@dataclass(frozen=True)
class Row:
    """`step_ms`: median over steps of the slowest rank. `ratio_to_best_peer`: 0.5 is twice as fast as the best peer."""

    implementation: str
    stage: int
    ranks: int
    parameters: int
    step_ms: float
    ratio_to_best_peer: float


@dataclass(frozen=True)
class Lap:
    """What one rank saw: times of the timed steps, and the losses of all steps, by contestant."""

    times: Times
    losses: dict[str, list[float]]


def heat(stage: int, workload: Workload) -> Lap:
    """Runs on every rank: build all contestants of a stage, then race them."""
    group = Group.world()
    losses: dict[str, list[float]] = {}
    contestants: dict[str, Callable[[], None]] = {}
    data = torch.Generator().manual_seed(group.rank)
    text = torch.randint(256, (workload.batch, workload.context + 1), generator=data).to(group.device)  # [B, T+1]
    for implementation in implementations(stage):
        torch.manual_seed(0)
        model = GPT(workload.gpt).to(group.device)
        step = implementation.build(model, group)
        losses[implementation.name] = []
        contestants[implementation.name] = _recorded(step, text, losses[implementation.name])
    return Lap(race(group, contestants, workload.turns), losses)


def _recorded(step: Step, text: torch.Tensor, losses: list[float]) -> Callable[[], None]:
    return lambda: losses.append(step(text[:, :-1], text[:, 1:]).item())


def check_same_work(laps: Sequence[Lap]) -> None:
    """ValueError if, on any rank and after any step, a contestant's loss is not that of the others."""
    for rank, lap in enumerate(laps):
        (first, expected), *others = lap.losses.items()
        for name, found in others:
            for number, (a, b) in enumerate(zip(expected, found, strict=True)):
                if not abs(a - b) <= SAME_LOSS * abs(a):
                    raise ValueError(f"rank {rank}, step {number}: the loss is {a} with {first} and {b} with {name}")


def measure(
    ranks: Sequence[int], workloads: Sequence[Workload], stages: Sequence[int] = STAGES, rounds: int = 1
) -> Iterator[list[Row]]:
    """The rows of one heat at a time. Every heat starts `rounds` worlds of plain and of huge pages."""
    for workload in workloads:
        for size in ranks:
            for stage in stages:
                times: Times = {}
                for suffix, laps in both_worlds(heat, stage, workload, ranks=size, rounds=rounds):
                    check_same_work(laps)
                    for name, steps in slowest([lap.times for lap in laps]).items():
                        times.setdefault(name + suffix, []).extend(steps)
                yield rank_rows(times, stage, size, workload.gpt.parameters)


def rank_rows(times: Times, stage: int, ranks: int, parameters: int) -> list[Row]:
    """One row a contestant, ours first."""
    ours = tuple(i.name for i in implementations(stage) if i.ours)
    step_ms = {name: median(steps) for name, steps in times.items()}
    best = min(ms for name, ms in step_ms.items() if not name.startswith(ours))
    rows = [Row(name, stage, ranks, parameters, ms, ms / best) for name, ms in step_ms.items()]
    return sorted(rows, key=lambda row: not row.implementation.startswith(ours))
