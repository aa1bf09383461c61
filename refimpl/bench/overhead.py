"""What a stage's own Python costs: microseconds a parameter and step, by function, on a model of almost no arithmetic.

100 units of 10 parameters of 64 elements each. Time is the CPU time of the rank's main thread, in which forward,
backward with its hooks and the update all run: waiting for other ranks is not counted, nor what gloo's threads do.

    by function     cProfile around warm steps, mean over ranks: self time of refimpl's functions, in which the C
                    functions that they call are included, less what the profiler itself takes (see `Cost`)
    called by them  the same of everybody else's Python functions, less those of the plain step
    no profiler     step less plain step, the honest sum. The plain step is the same model on one rank by plain torch,
                    whose optimizer walks over 1,000 tensors where a stage has a few flat ones
    torch's own     the same of DDP, ZeroRedundancyOptimizer or FSDP2, which gathers each unit (see `peers.py`)

ZeRO-3 three times: each of the 100 units gathered by itself; neighbours as one (`ZeroConfig.unit_size`); and with
parameters as small as these left whole, as DeepSpeed's default does (`stage3_param_persistence_threshold`, 100,000).

DeepSpeed and FSDP2 hide this time behind a GPU's kernels as long as the kernels take longer.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from cProfile import Profile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, median
from types import CodeType

import torch
from torch import Tensor, nn

import refimpl
from refimpl import launch
from refimpl.bench.peers import STAGES, Step, adamw, plain_step, torchs_own
from refimpl.comm.group import Group
from refimpl.zero.config import ZeroConfig

ROOT = Path(refimpl.__file__).parent
HEAT = ("stage", "ranks", "parameters", "gathered")  # what all rows of a heat have in common
ALL = "all functions of refimpl"
OTHERS = "called by them, less plain step"
HONEST = "step less plain step, no profiler"
PLAIN = "plain step, no profiler"
WIDTH = 64
PARAMETERS = 10  # a unit
GATHERED = {  # what ZeRO-3 gathers
    "each unit": ZeroConfig(),
    "neighbours as one": ZeroConfig(unit_size=16_384),
    "nothing this small": ZeroConfig(param_persistence_threshold=100_000),
}


@dataclass(frozen=True)
class Row:
    """Means over ranks and steps, rounded. `us_a_step`: self time, or what the sums at the end say."""

    function: str
    stage: int
    ranks: int
    parameters: int
    gathered: str
    calls: int
    us_a_step: int
    us_a_parameter: float


class Scales(nn.Module):
    """y = w x + b, element by element, five times."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(PARAMETERS // 2):
            self.register_parameter(f"w{number}", nn.Parameter(torch.ones(WIDTH)))
            self.register_parameter(f"b{number}", nn.Parameter(torch.zeros(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        """x [64] -> [64]."""
        for number in range(PARAMETERS // 2):
            x = torch.addcmul(getattr(self, f"b{number}"), x, getattr(self, f"w{number}"))
        return x


class Units(nn.Module):
    """So many `Scales`, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.units = nn.Sequential(*(Scales() for _ in range(count)))

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        """x [64] -> a loss []."""
        loss: Tensor = self.units(x).sum()
        return loss


@dataclass(frozen=True)
class Lap:
    """What one rank saw in a step, in us: calls and self time by function; all others; the steps unprofiled."""

    functions: dict[str, tuple[float, float]]
    others: float
    staged: float
    plain: float


def heat(stage: int, config: ZeroConfig, units: int, turns: int, steps: int) -> Lap:
    """Runs on every rank: a stage and a plain step take turns, first timed, then profiled."""
    models = [Units(units) for _ in range(2)]
    optimizers = [adamw(model.parameters()) for model in models]
    STAGES[stage](models[0], optimizers[0], Group.world(), config)
    staged, plain = (repeated(plain_step(*pair), steps) for pair in zip(models, optimizers, strict=True))
    both = [(cpu_us(staged), cpu_us(plain)) for _ in range(turns + 1)][1:]  # the first is a warm-up
    took = [median(us) / steps for us in zip(*both, strict=True)]
    ours, others = profiled(staged)
    _, plain_others = profiled(plain)
    per_step = {name: (calls / steps, us / steps) for name, (calls, us) in ours.items()}
    return Lap(per_step, (others - plain_others) / steps, *took)


def torchs_heat(stage: int, units: int, turns: int) -> float:
    """Runs on every rank: a step by torch's own and a plain one take turns; the difference, in us."""
    models = [Units(units) for _ in range(2)]
    theirs = repeated(torchs_own(stage, Scales).build(models[0], Group.world(), torch.float32))
    plain = repeated(plain_step(models[1], adamw(models[1].parameters())))
    return median([cpu_us(theirs) - cpu_us(plain) for _ in range(turns + 1)][1:])


def repeated(step: Step, steps: int = 1) -> Callable[[], None]:
    x = torch.ones(WIDTH)

    def run() -> None:
        for _ in range(steps):
            step(x, x)

    return run


def cpu_us(run: Callable[[], None]) -> float:
    """CPU time of this thread, in us."""
    begun = time.thread_time_ns()
    run()
    return (time.thread_time_ns() - begun) / 1e3


@dataclass(frozen=True)
class Cost:
    """What the profiler adds to a self time, in us: for each call of the function, and for each call that it makes."""

    called: float
    calling: float

    @classmethod
    def measured(cls, calls: int = 20_000) -> "Cost":
        """By functions that do nothing."""

        def nothing() -> None:
            pass

        def call() -> None:
            for _ in range(calls):
                nothing()

        profile = Profile(time.thread_time_ns, timeunit=1e-3, builtins=False)
        profile.runcall(call)
        self_us = {entry.code: entry.inlinetime for entry in profile.getstats()}
        return cls(self_us[nothing.__code__] / calls, (self_us[call.__code__] - cpu_us(call)) / calls)


def profiled(run: Callable[[], None]) -> tuple[dict[str, tuple[float, float]], float]:
    """(calls, self time in us) of each function of refimpl, and the self time of all others.

    What is written inside a function, such as a comprehension, is counted as the function.
    """
    cost, profile = Cost.measured(), Profile(time.thread_time_ns, timeunit=1e-3, builtins=False)
    profile.runcall(run)
    ours: dict[str, tuple[float, float]] = {}
    others = 0.0
    for entry in profile.getstats():
        made = sum(call.callcount for call in entry.calls or ())
        us = entry.inlinetime - cost.called * entry.callcount - cost.calling * made
        code = entry.code
        file = Path(code.co_filename) if isinstance(code, CodeType) else Path()
        if not isinstance(code, CodeType) or ROOT not in file.parents or file == Path(__file__):
            others += us
            continue
        function, inner, _ = code.co_qualname.partition(".<")
        name = f"{file.relative_to(ROOT).with_suffix('')} {function}"
        before = ours.get(name, (0.0, 0.0))
        ours[name] = (before[0] + (0 if inner else entry.callcount), before[1] + us)
    return ours, others


def measure(
    ranks: Sequence[int],
    stages: Sequence[int],
    units: int = 100,
    turns: int = 5,
    steps: int = 4,
    top: int = 25,
) -> Iterator[list[Row]]:
    """The rows of one heat (ranks, stage, what is gathered): the `top` dearest functions, the rest, the sums."""
    for count, stage in product(ranks, stages):
        torchs = mean(launch.run(torchs_heat, stage, units, turns, ranks=count, device="cpu", timeout=600))
        for gathered, config in GATHERED.items() if stage == 3 else [("", ZeroConfig())]:
            laps = launch.run(heat, stage, config, units, turns, steps, ranks=count, device="cpu", timeout=600)
            yield rows(laps, torchs, stage, gathered, units, top)


def torchs_row(stage: int) -> str:
    return f"{torchs_own(stage).name} less plain step"


def rows(laps: Sequence[Lap], torchs: float, stage: int, gathered: str, units: int, top: int) -> list[Row]:
    """Means over ranks, dearest first."""
    names = dict.fromkeys(name for lap in laps for name in lap.functions)
    seen = {n: [lap.functions.get(n, (0.0, 0.0)) for lap in laps] for n in names}
    means = {name: (mean(calls), mean(us)) for name, pairs in seen.items() for calls, us in [zip(*pairs, strict=True)]}
    dearest = sorted(means, key=lambda name: -means[name][1])
    lines = [(name, *means[name]) for name in dearest[:top]]
    rest = [means[name] for name in dearest[top:]]
    lines.append((f"{len(rest)} other functions of refimpl", sum(c for c, _ in rest), sum(us for _, us in rest)))
    lines.append((ALL, *(sum(column) for column in zip(*means.values(), strict=True))))
    lines.append((OTHERS, 0.0, mean(lap.others for lap in laps)))
    lines.append((HONEST, 0.0, mean(lap.staged - lap.plain for lap in laps)))
    lines.append((torchs_row(stage), 0.0, torchs))
    lines.append((PLAIN, 0.0, mean(lap.plain for lap in laps)))
    parameters = units * PARAMETERS
    heat_of = (stage, len(laps), parameters, gathered)
    return [Row(n, *heat_of, round(calls), round(us), us / parameters) for n, calls, us in lines]
