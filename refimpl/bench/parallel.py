"""Step time of each way to split a model beside torch's own: tensor, sequence, pipeline and context parallelism.

One heat is (axis, kind, ranks): ours and torch's (see `parallel_peers.py`) train the same weights on the same batches
with the same optimizer and take turns on the same ranks. Their losses must agree after every step, or there is no
comparison. A ratio is the median over steps of ours divided by the peer's step of the same turn, so that what else the
machine does falls out as far as it is slow; below 1 is faster.

A pipeline is also held to its formula: a third contestant computes every operation of a rank's program, in its order,
and neither sends nor waits. What a step should take is that, and the bubble that the table states for the durations
of forward and backward measured there. Where backward is split the simulated clock says it, with each stage's own
durations: a first stage has no input half, all of its backward is the weights', and the formulas are for stages that
are alike. That is no way out: on stages that are alike the clock and the formula agree (a test holds every schedule to
it), it knows of no message and no overhead, so no runner of the table is faster, and it takes no duration from the
runner that is judged. With fewer cores than ranks there is no such ratio: a rank that computes in another's bubble then
takes its core.
On a machine that others use too, the fastest steps say more than the median.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean, median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refimpl.bench.parallel_peers import (
    SCHEDULES,
    Step,
    context,
    pipeline,
    tensor,
    torch_context,
    torch_pipeline,
    torch_tensor,
)
from refimpl.bench.peers import ALONE, adamw
from refimpl.bench.publish import cores
from refimpl.bench.race import Times, Turns, both_worlds, race, slowest
from refimpl.bench.zero import Lap, check_same_work, recorded
from refimpl.comm.group import Group
from refimpl.measure.clock import now
from refimpl.model.gpt import GPT, Block, GPTConfig
from refimpl.parallel.context.layout import Layout
from refimpl.parallel.pipeline import clock
from refimpl.parallel.pipeline.runner import Pipeline
from refimpl.parallel.pipeline.runner import Step as Program
from refimpl.parallel.pipeline.schedules.named import schedule
from refimpl.parallel.pipeline.schedules.table import Cost, Op, Table

KINDS = {"tensor": ("plain", "sequence"), "pipeline": tuple(SCHEDULES), "context": ("ring",)}
AXES = tuple(KINDS)
HEAT = ("axis", "kind", "ranks")  # what all rows of a heat have in common
OURS, PEER = "refimpl", "torch"
Kind = tuple[str, int]  # F, B, I or W, of a stage


@dataclass(frozen=True)
class Workload:
    """What is trained: a GPT over random bytes, or a chain of its blocks, the same number on each rank.

    Tensor parallelism: B sequences of T tokens. Pipeline: m micro-batches of as many. Context: one sequence, a quarter
    of the layers. With 256 tokens a micro-batch an operation takes some 20 ms, and a message's Python, half of one, is
    seen, but does not make the figure.
    """

    width: int = 256
    layers: int = 8
    batch: int = 4
    context: int = 64
    micro_batches: int = 8
    sequence: int = 1024
    turns: Turns = field(default_factory=Turns)

    def gpt(self, context: int, layers: int) -> GPTConfig:
        heads = max(4, self.width // 64)
        return GPTConfig(vocab=256, context=context, width=self.width, layers=layers, heads=heads)


@dataclass(frozen=True)
class Row:
    """Of the slowest rank. Ratios to the peer: the median over steps of the same turn and place; of the fastest steps.

    `of_formula`: to compute and bubble of the same turn; of the fastest steps. None where that is no measure.
    """

    implementation: str
    axis: str
    kind: str
    ranks: int
    pages: str
    step_ms: float  # median
    ratio: float
    fastest_ratio: float
    of_formula: float | None = None
    fastest_of_formula: float | None = None


@dataclass(frozen=True)
class Run(Lap):
    """What one rank saw; `operations`: the median seconds of each kind and stage, in a pipeline."""

    operations: dict[Kind, float] = field(default_factory=dict)


class Seconds(NamedTuple):
    """What each stage's operations take; messages take no time."""

    took: Mapping[Kind, float]
    message: float = 0

    def of(self, op: Op) -> float:
        return self.took[op.kind, op.stage]


def heat(axis: str, kind: str, workload: Workload) -> Run:
    """Runs on every rank: build the contestants, then race them."""
    group = Group.world()
    operations: dict[Kind, list[float]] = {}
    if axis == "pipeline":
        steps = pipeline_steps(group, workload, kind, operations)
    else:
        steps = gpt_steps(group, workload, axis, kind)
    losses: dict[str, list[float]] = {name: [] for name in steps if name != ALONE}
    times = race(group, {name: recorded(step, losses.get(name, [])) for name, step in steps.items()}, workload.turns)
    return Run(times, losses, {kind: median(seconds) for kind, seconds in operations.items()})


def gpt_steps(group: Group, workload: Workload, axis: str, kind: str) -> dict[str, Step]:
    sequence = kind == "sequence"
    builds: dict[str, Callable[..., Step]] = {OURS: context, PEER: torch_context}
    config, batch = workload.gpt(workload.sequence, max(1, workload.layers // 4)), 1
    if axis == "tensor":
        builds = {OURS: partial(tensor, sequence=sequence), PEER: partial(torch_tensor, sequence=sequence)}
        config, batch = workload.gpt(workload.context, workload.layers), workload.batch
    text = torch.randint(256, (batch, config.context + 1), generator=torch.Generator().manual_seed(0)).to(group.device)
    steps = {}
    for name, build in builds.items():
        torch.manual_seed(0)
        steps[name] = build(GPT(config).to(group.device), group, text[:, :-1], text[:, 1:])
    return steps


def pipeline_steps(group: Group, workload: Workload, kind: str, operations: dict[Kind, list[float]]) -> dict[str, Step]:
    """`operations`: seconds of each kind and stage, as the steps of compute alone are taken."""
    table = schedule(kind, group.size, workload.micro_batches)
    draw = torch.Generator().manual_seed(1)
    shape = (workload.micro_batches * workload.batch, workload.context, workload.width)
    inputs, targets = (torch.randn(shape, generator=draw).to(group.device) for _ in range(2))
    steps = {}
    for name, build in ((OURS, pipeline), (PEER, torch_pipeline)):
        stages = chain(table, group, workload)
        steps[name] = build(table, stages, group, F.mse_loss, inputs, targets)
    steps[ALONE] = alone(Pipeline(table, chain(table, group, workload), group, F.mse_loss), inputs, targets, operations)
    return steps


def chain(table: Table, group: Group, workload: Workload) -> dict[int, nn.Module]:
    """The stages of this rank: each an equal part of the blocks."""
    each = workload.layers // table.stages
    torch.manual_seed(0)
    blocks = [Block(workload.gpt(workload.context, workload.layers)) for _ in range(workload.layers)]
    held = table.holds(group.rank)
    return {s: nn.Sequential(*blocks[s * each : (s + 1) * each]).to(group.device) for s in held}


def alone(runner: Pipeline, inputs: Tensor, targets: Tensor, operations: dict[Kind, list[float]]) -> Step:
    """This rank's operations in the order of the table; in place of what others would send there are the inputs."""
    table, rank = runner.table, runner.group.rank
    optimizer = adamw(p for stage in runner.stages.values() for p in stage.parameters())  # type: ignore[attr-defined]
    parts, wanted = inputs.chunk(table.micro_batches), targets.chunk(table.micro_batches)
    grad = [torch.full_like(parts[0], 1e-6)]

    def step() -> None:
        program = Program(runner, parts, wanted, 1 / table.micro_batches)
        for op in (line for line in runner.program if isinstance(line, Op)):
            for value in op.needs(table.stages):
                if value.stage != op.stage and table.receiver(value) == rank:
                    came = parts[op.micro].detach().requires_grad_() if value.way == "forward" else grad
                    program.here[value] = came
            begun = now(inputs.device)
            program.do(op)
            operations.setdefault((op.kind, op.stage), []).append(now(inputs.device) - begun)
            if op.gives and table.receiver(op.gives) is not None:
                program.here.pop(op.gives)
        optimizer.step()
        optimizer.zero_grad()

    return step


def check(ranks: Sequence[int], axes: Sequence[str], workload: Workload, kinds: Sequence[str] = ()) -> None:
    """ValueError for sizes that some heat cannot have, before the first begins."""
    for axis, kind, size in heats(ranks, axes, kinds):
        gpt = workload.gpt(workload.context, workload.layers)
        if axis == "pipeline" and workload.layers % (stages := schedule(kind, size, workload.micro_batches).stages):
            raise ValueError(f"{workload.layers} layers do not make {stages} equal stages ({kind}, {size} ranks)")
        if axis == "tensor" and gpt.heads % size:
            raise ValueError(f"{gpt.heads} heads cannot be dealt out equally to {size} ranks, as torch asks")
        if kind == "sequence" and workload.context % size:
            raise ValueError(f"{workload.context} tokens cannot be dealt out equally to {size} ranks")
        if axis == "context":
            Layout(workload.sequence, size, zigzag=True)


def heats(ranks: Sequence[int], axes: Sequence[str], kinds: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """(axis, kind, ranks) of every heat; `kinds`: these alone, if there are any."""
    every = ((axis, kind) for axis in axes for kind in KINDS[axis] if kind in kinds or not kinds)
    return ((axis, kind, size) for axis, kind in every for size in ranks)


def measure(
    ranks: Sequence[int], axes: Sequence[str], workload: Workload, kinds: Sequence[str] = (), rounds: int = 1
) -> Iterator[list[Row]]:
    """The rows of one heat at a time. Every heat starts `rounds` worlds of plain and of huge pages. See `check`."""
    for axis, kind, size in heats(ranks, axes, kinds):
        laps: dict[str, list[Times]] = {}
        lost: list[float] = []
        for pages, runs in both_worlds(heat, axis, kind, workload, ranks=size, rounds=rounds):
            laps.setdefault(pages, []).append(slowest(check_same_work(runs)))
            if axis == "pipeline":
                lost.append(bubble(schedule(kind, size, workload.micro_batches), runs))
        wait = mean(lost) if lost and size <= cores() else None
        yield [row for pages, times in laps.items() for row in rank_rows(times, axis, kind, size, pages, wait)]


def bubble(table: Table, runs: Sequence[Run]) -> float:
    """What a step takes beyond the busiest rank's work, in units of it: by the table's formula, or by the clock."""
    seen: dict[Kind, list[float]] = {}
    for run in runs:
        for kind, seconds in run.operations.items():
            seen.setdefault(kind, []).append(seconds)
    if table.splits:
        cost = Seconds({kind: mean(seconds) for kind, seconds in seen.items()})
        spans, works = clock.play(table, cost), [sum(map(cost.of, order)) for order in table.orders]
        return max(spans[o[-1]].end - spans[o[0]].begin for o in table.orders) / max(works) - 1
    forward, backward = (mean(s for (kind, _), seconds in seen.items() if kind == k for s in seconds) for k in "FB")
    alike = Cost(forward, backward / 2, backward / 2)
    stated = table.bubble(alike)
    return (clock.bubble(table, alike) if stated is None else stated) / sum(map(alike.of, table.orders[0]))


def rank_rows(
    laps: Sequence[Times], axis: str, kind: str, ranks: int, pages: str, wait: float | None = None
) -> list[Row]:
    """One row a contestant. laps: of each round, the slowest rank's milliseconds; wait: what `bubble` says."""
    times = {name: [ms for lap in laps for ms in lap[name]] for name in laps[0]}
    rows = []
    for name, steps in times.items():
        row = Row(name, axis, kind, ranks, pages, median(steps), *compared(steps, times[PEER]))
        if wait is not None:
            formula = [compute * (1 + wait) for compute in times[ALONE]]
            held, fastest = compared(steps, formula)
            row = replace(row, of_formula=held, fastest_of_formula=fastest)
        rows.append(row)
    return rows


def compared(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The median ratio of two steps that were taken close to each other, and the ratio of the fastest."""
    return median(a / b for a, b in zip(ours, theirs, strict=True)), min(ours) / min(theirs)
