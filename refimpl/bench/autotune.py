"""Which ZeRO stage and micro-batch train a script fastest: each candidate runs the script itself for a few steps.

    for each stage that the file allows, from the least:
        micro-batches 1, 2, 4, ... (or those that the file lists) while each is better than the last;
        where the script's own first one fails, its half, and so on, until one does not
        on to the next stage while its best is better than the last one's

DeepSpeed's autotuner in its fast mode. It first predicts from a model's size what fits; here a trial that ends without
memory has simply no result, as any other that fails. DeepSpeed's file: deepspeed/autotuning/autotuner.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from refimpl.engine.autotuning import Autotuning
from refimpl.engine.configuration.batch import MICRO, STEPS, TRAIN, size
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.quote import quote

Metrics = Mapping[str, float]
DOUBLINGS = 12  # of a micro-batch, at most


@dataclass(frozen=True)
class Candidate:
    """A configuration that is tried. stage None: the file has none."""

    stage: int | None
    micro: int  # samples of one forward of one rank
    steps: int  # micro-batches an update

    @property
    def name(self) -> str:
        """DeepSpeed's name of its folder."""
        return f"z{self.stage or 0}_tmbspg{self.micro}_gas{self.steps}"

    def applied(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration `raw` with these numbers."""
        config = {name: value for name, value in raw.items() if name != TRAIN}
        config |= {MICRO: self.micro, STEPS: self.steps}
        if self.stage is not None:
            zero = raw.get("zero_optimization")
            config["zero_optimization"] = {**(zero if isinstance(zero, Mapping) else {}), "stage": self.stage}
        return config


@dataclass
class Space:
    """What is tried: the stages, and of each the micro-batches, as the file allows."""

    stages: list[int | None]
    sizes: list[int]
    steps: int
    smaller: tuple[int, ...] = ()  # where the first of these fails, the largest first

    @classmethod
    def of(cls, raw: Mapping[str, Any], asked: Autotuning, ranks: int, said: Mapping[str, int]) -> "Space":
        """raw: the file; a list stands for each of its elements, and `"stage": "all"` for 0 to 3. ranks: data-parallel.

        said: what the script's own options say where the file says "auto". ConfigError if nothing is left to try, and
        for what is no stage or no size.
        """
        stages, steps, micro = _stages(raw.get("zero_optimization")), _number(raw, STEPS, said), raw.get(MICRO)
        halves: list[int] = []
        if isinstance(micro, list):
            sizes = sorted({_number({MICRO: one}, MICRO, said) for one in micro or [micro]})
        else:
            least = max(_number(raw, MICRO, said), asked.min_train_micro_batch_size_per_gpu)
            sizes = [least << doubled for doubled in range(DOUBLINGS)]
            halves = [least >> halved for halved in range(1, least.bit_length())]
        most = asked.max_train_micro_batch_size_per_gpu or sizes[-1]
        batch = asked.max_train_batch_size
        fits = list(takewhile(lambda m: m <= most and (batch is None or m * steps * ranks <= batch), sizes))
        if not fits:
            raise ConfigError(
                f"autotuning: no micro-batch from {sizes[0]} up is within max_train_micro_batch_size_per_gpu and, with "
                f"{steps} micro-batches on each of {ranks} ranks, max_train_batch_size = {batch}"
            )
        smaller = takewhile(lambda m: m >= asked.min_train_micro_batch_size_per_gpu, halves)
        return cls(stages, fits, steps, tuple(smaller))


def _stages(zero: Any) -> list[int | None]:
    """Of a section `zero_optimization`: 0 to 3 where it says "all", or not which; [None] without one."""
    if zero is None:
        return [None]
    stage = zero.get("stage", "all") if isinstance(zero, Mapping) else zero
    stages = [0, 1, 2, 3] if stage == "all" else stage if isinstance(stage, list) else [stage]
    if not stages or any(one not in (0, 1, 2, 3) for one in stages):
        raise ConfigError(f'zero_optimization.stage = {quote(stage)}: 0, 1, 2 or 3, a list of these, or "all"')
    for name, value in zero.items() if isinstance(zero, Mapping) else ():
        if isinstance(value, list) and name != "stage":
            raise ConfigError(
                f"zero_optimization.{name} = {quote(value)}: no list is tried but of stage, and of {MICRO}"
            )
    return [int(one) for one in stages]


def _number(raw: Mapping[str, Any], key: str, said: Mapping[str, int]) -> int:
    return said.get(key, 1) if raw.get(key) == "auto" else size(raw, key) or said.get(key, 1)


@dataclass
class Search:
    """The trials so far, and what is tried next."""

    asked: Autotuning
    measure: Callable[[Candidate], Metrics | None]  # None: it failed
    tried: list[tuple[Candidate, float | None]] = field(default_factory=list)  # the larger the better
    worse: int = 0  # trials since the best

    def run(self, space: Space) -> Candidate | None:
        """The best candidate, None if all failed."""
        before: float | None = None
        for stage in space.stages:
            best = max((value for value in self.of_stage(stage, space) if value is not None), default=None)
            if self.over or (before is not None and (best is None or best <= before)):
                break
            before = best
        return self.best

    def of_stage(self, stage: int | None, space: Space) -> Iterator[float | None]:
        """The value of each micro-batch that is tried: until one fails or is no better than the last.

        Where the first fails, until a smaller one does not.
        """
        last: float | None = None
        for micro in space.sizes:
            if self.over:
                return
            value = self.one(Candidate(stage, micro, space.steps))
            yield value
            if value is None or (last is not None and value <= last):
                break
            last = value
        for micro in space.smaller if last is None else ():
            if self.over or value is not None:
                return
            value = self.one(Candidate(stage, micro, space.steps))
            yield value

    def one(self, candidate: Candidate) -> float | None:
        found = self.measure(candidate)
        value = None if found is None else self.value(found)
        best = best_of(self.tried)
        self.worse = 0 if value is not None and (best is None or value > best[1]) else self.worse + 1
        self.tried.append((candidate, value))
        return value

    def value(self, found: Metrics) -> float:
        """Larger is better."""
        return -found["latency"] if self.asked.metric == "latency" else found["throughput"]

    @property
    def over(self) -> bool:
        return len(self.tried) >= self.asked.tuner_num_trials or self.worse >= self.asked.tuner_early_stopping

    @property
    def best(self) -> Candidate | None:
        best = best_of(self.tried)
        return None if best is None else best[0]


def best_of(tried: Iterable[tuple[Candidate, float | None]]) -> tuple[Candidate, float] | None:
    """The first with the largest value; None if all failed."""
    good = [(candidate, value) for candidate, value in tried if value is not None]
    return max(good, key=lambda pair: pair[1], default=None)
