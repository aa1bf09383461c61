"""How much of a step's communication is hidden, by the size of a bucket, over a slow link: measured, and predicted.

DDP trains a GPT, every rank a node of its own, over the link of `refimpl.comm.link`. In one world are measured

    computing   the same stage on a group of one: when each gradient is there, when backward and the update are over
    the link    all-reduces of several sizes, to which alpha and beta are fitted
    each size   its steps in turns with the other sizes', each with the timeline of its ledger

and `refimpl.comm.bucket_model` is told the first two, nothing of the third. Exposed is where the host stands still for
a collective in forward and backward; the norm's one number travels in the update.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from refimpl import launch
from refimpl.bench.peers import adamw
from refimpl.bench.race import Turns
from refimpl.comm.alpha_beta import AlphaBeta, fit
from refimpl.comm.bucket_model import Step, play
from refimpl.comm.group import Group
from refimpl.comm.link import Link
from refimpl.comm.nodes import RANKS_PER_NODE
from refimpl.comm.topology import tell_floor
from refimpl.measure.ledger import Ledger
from refimpl.measure.timeline import Timeline, phase, timelines
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.ranks.environment import variables
from refimpl.zero.config import ZeroConfig
from refimpl.zero.ddp import DDP
from refimpl.zero.gradients import IN_FLIGHT

HEAT = ("ranks", "parameters", "link")  # what all rows of a heat have in common
PROBES = (1_000, 100_000, 1_000_000)  # bytes of the all-reduces that are timed, and all gradients'


@dataclass(frozen=True)
class Workload:
    """A GPT of `layers` layers and `width`, on one sequence of `context` random bytes a rank."""

    width: int = 128
    layers: int = 6
    context: int = 128
    turns: Turns = field(default_factory=lambda: Turns(turns=3, steps=1))

    def model(self) -> GPT:
        torch.manual_seed(0)
        heads = math.gcd(self.width, max(1, self.width // 64))  # about 64 elements a head
        return GPT(GPTConfig(vocab=256, context=self.context, width=self.width, layers=self.layers, heads=heads))

    def batch(self, rank: int) -> tuple[Tensor, Tensor]:
        """[1, T] twice."""
        text = torch.randint(256, (1, self.context + 1), generator=torch.Generator().manual_seed(rank))
        return text[:, :-1], text[:, 1:]


@dataclass(frozen=True)
class Row:
    """`bucket_size` in elements. Milliseconds: medians over steps, of the slowest rank at each step.

    hidden: the share of the time in which something was under way that was computed in, too.
    """

    bucket_size: int
    buckets: int
    ranks: int
    parameters: int
    link: str
    step_ms: float
    predicted_ms: float
    exposed_ms: float
    predicted_exposed_ms: float
    hidden: float


@dataclass(frozen=True)
class Computing:
    """Without other ranks, in seconds. `full`: from the step's begin to each parameter's gradient."""

    full: dict[str, float]
    backward: float
    whole: float


@dataclass(frozen=True)
class Lap:
    """What one rank saw. By size of a bucket: the parameters of its buckets, and its steps."""

    computing: Computing
    link: AlphaBeta
    buckets: dict[int, list[list[str]]]
    sizes: dict[str, int]  # bytes of each parameter
    steps: dict[int, list[Timeline]]


def heat(sizes: Sequence[int], workload: Workload, link: Link) -> Lap:
    """Runs on every rank: measure the computing and the link, then let the sizes take turns."""
    world = Group.world(link=link)
    tell_floor(world)
    alone = Trainee(workload, Group(None, Ledger(), torch.device("cpu")), max(sizes))
    trainees = {size: Trainee(workload, Group.world(Ledger(), link=link), size) for size in sizes}
    turns = workload.turns
    for turn in range(turns.warm_up + turns.turns):
        for trainee in (alone, *trainees.values()):
            if turn == turns.warm_up:
                trainee.group.ledger.reset()
            world.barrier()
            for _ in range(turns.steps):
                trainee.step()
    whole = sum(p.nbytes for p in alone.stage.names)
    return Lap(
        alone.computing(),
        probe(world, [*(size for size in PROBES if size < whole), whole], turns.turns),
        {size: [[t.stage.names[p] for p in b.params] for b in t.stage.buckets] for size, t in trainees.items()},
        {name: p.nbytes for p, name in alone.stage.names.items()},
        {size: timelines(trainee.group.ledger) for size, trainee in trainees.items()},
    )


class Trainee:
    """A model under DDP with buckets of one size."""

    def __init__(self, workload: Workload, group: Group, size: int) -> None:
        model = workload.model()
        self.group = group
        self.stage = DDP(model, adamw(model.parameters()), group, ZeroConfig(reduce_bucket_size=size))
        self.text = workload.batch(Group.world().rank)

    def step(self) -> None:
        """One step, with its marks."""
        ledger = self.group.ledger
        with phase(ledger, "step"):
            with phase(ledger, "forward"):
                loss = self.stage.model(*self.text)
            with phase(ledger, "backward"):
                loss.backward()
            with phase(ledger, "update"):
                self.stage.optimizer.step()
                self.stage.optimizer.zero_grad()

    def computing(self) -> Computing:
        """Medians over the steps of a group of one."""
        steps = timelines(self.group.ledger)
        arrivals: dict[str, list[float]] = {}
        marks = [e for e in self.group.ledger.events if e.op.startswith("grad ")]
        for one in steps:
            for mark in marks:
                if one.step.begin <= mark.time_ns < one.step.end:
                    since = (mark.time_ns - one.step.begin) / 1e9
                    arrivals.setdefault(mark.op.removeprefix("grad "), []).append(since)
        until = [(s.end - one.step.begin) / 1e9 for one in steps for s in one.phases if s.name == "backward"]
        full = {name: median(seen) for name, seen in arrivals.items()}
        return Computing(full, max(median(until), *full.values()), median(one.step.ms for one in steps) / 1e3)


def probe(group: Group, sizes: Sequence[int], times: int) -> AlphaBeta:
    """Alpha and beta of a whole all-reduce of n bytes. A collective."""
    seconds = []
    for size in sizes:
        x = group.empty(max(1, size // 4), torch.float32).zero_()
        ledger = Ledger()
        for _ in range(times + 1):
            group.barrier()
            with phase(ledger, "step"):
                group.all_reduce(x)
        mine = median(one.step.ms for one in timelines(ledger)[1:]) / 1e3
        seconds.append(max(group.all_gather_object(mine)))
    return fit(sizes, seconds)


def race(ranks: int, sizes: Sequence[int], workload: Workload, link: str) -> list[Lap]:
    """What each rank saw; every rank is a node. ValueError for the link."""
    with variables({RANKS_PER_NODE: "1"}):
        return launch.run(heat, sizes, workload, Link.parse(link), ranks=ranks, device="cpu", timeout=600)


def rows(laps: Sequence[Lap], link: str) -> list[Row]:
    """One row a size."""
    sizes = laps[0].sizes
    found = []
    for size, buckets in laps[0].buckets.items():
        step = slowest([[one.step.ms for one in lap.steps[size]] for lap in laps])
        exposed = slowest([[in_backward(one) for one in lap.steps[size]] for lap in laps])
        hidden = [one.hidden_ms / (one.hidden_ms + one.exposed_ms) for lap in laps for one in lap.steps[size]]
        predicted = [predict(lap, size) for lap in laps]
        update = [lap.computing.whole - lap.computing.backward + lap.link.alpha for lap in laps]  # alpha: the norm's
        seconds = max(p.seconds + more for p, more in zip(predicted, update, strict=True))
        found.append(
            Row(
                size, len(buckets), len(laps), sum(sizes.values()) // 4, link, step, 1e3 * seconds, exposed,
                1e3 * max(p.exposed for p in predicted), median(hidden),
            )
        )  # fmt: skip
    return found


def slowest(ranks: Sequence[Sequence[float]]) -> float:
    """The median over steps of the largest of the ranks."""
    middle: float = median(max(step) for step in zip(*ranks, strict=True))
    return middle


def in_backward(one: Timeline) -> float:
    """Milliseconds exposed before the update."""
    begin = next(span.begin for span in one.phases if span.name == "update")
    return sum(span.ms for span in one.held if span.begin < begin)


def predict(lap: Lap, size: int) -> Step:
    """What the model says of buckets of this size."""
    computing = lap.computing
    filled: list[tuple[float, float]] = []
    for names in lap.buckets[size]:
        full = max(computing.full.get(name, computing.backward) for name in names)
        filled.append((full, float(sum(lap.sizes[name] for name in names))))
    return play(filled, computing.backward, lap.link, IN_FLIGHT)


def best(heat: Sequence[Row]) -> dict[str, Any]:
    """The bucket size of the least step, measured and predicted, and what the predicted one costs over the best."""
    measured = min(heat, key=lambda row: row.step_ms)
    predicted = min(heat, key=lambda row: row.predicted_ms)
    return {
        "measured": measured.bucket_size,
        "predicted": predicted.bucket_size,
        "costs": predicted.step_ms / measured.step_ms,
    }
