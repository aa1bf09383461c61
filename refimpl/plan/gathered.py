"""What ZeRO-3 has whole at its fullest: weights in use, those gathered ahead, those kept for backward.

A unit is a block, as on a GPU, the embedding, the learned positions, the last norm or the head; a tied embedding is the
model's own, whole from its first to its last use. The walk asks the same two functions as the stage itself
(`refimpl/zero/gather/prefetch.py`), so that its bytes are those that `MemoryMeter` counts. What is smaller than
`stage3_param_persistence_threshold` stays whole on every rank; it is not counted here: biases and norms, about 1/w.
With DeepSpeed's own budgets about a billion elements stay for backward: 2 GB in 16 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from refimpl.plan.shape import Shape
from refimpl.zero.flat import ALIGN, round_up
from refimpl.zero.gather.prefetch import Pass, Trace, next_ones, soon_again


@dataclass(frozen=True)
class Budgets:
    """In elements; by default DeepSpeed's, `zero_optimization.stage3_...`."""

    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000


DEEPSPEEDS = Budgets()


@dataclass(eq=False)
class Planned:
    """A unit, as far as the rules look at it."""

    numel: int
    padded: int
    is_free: bool = True
    in_flight: bool = False


@cache
def elements(shape: Shape, replicas: int, tp: int, ep: int, budgets: Budgets) -> int:
    """Of a rank, at the fullest; each unit padded. replicas: the dp x cp ranks that divide the parameters."""

    def unit(numel: int, ranks: int = replicas) -> list[Planned]:
        return [Planned(numel, round_up(numel, ranks * ALIGN))] if numel else []

    around = unit(shape.embedding(tp)) if shape.tied else []
    ends = [] if shape.tied else [unit(shape.embedding(tp)) for _ in range(2)]
    experts = shape.experts.count // ep * shape.expert if shape.experts else 0
    blocks = [
        unit(shape.blocks(i, i + 1, tp)) + unit(shape.mixtures(i, i + 1) * experts, replicas // ep)
        for i in range(shape.layers)
    ]
    before, behind = [*ends[:1], unit(shape.learned_positions)], [unit(shape.last_norm), *ends[1:]]
    walk = Walk(budgets)
    for _ in range(2):  # the first writes down what the second gathers ahead
        walk.step(around, before, blocks, behind)
    return walk.most


Units = Sequence[list[Any]]  # of each module


class Walk:
    """A training step after the other. Units are `Planned`, which the stage's rules take for theirs."""

    def __init__(self, budgets: Budgets) -> None:
        self.budgets, self.trace, self.whole, self.most = budgets, Trace(), set[Any](), 0

    def step(self, around: list[Any], before: Units, blocks: Units, behind: Units) -> None:
        """Forward through all, and back. around: the model's own."""
        self.trace.restart()
        self.need(around, "forward")
        for units in (*before, *blocks, *behind):
            self.need(units, "forward")
            self.leave(units)
        self.leave(around)
        self.need(around, "backward")
        for units in reversed([*before, *blocks, *behind]):
            self.need(units, "backward")
            self.reduce(units)
        self.reduce(around)

    def need(self, units: list[Any], during: Pass) -> None:
        """They are used, and the next ones are on their way."""
        for unit in units:
            self.trace.visit(unit, during)
        ahead = next_ones(self.trace, units, self.whole, self.budgets) if units else []
        for unit in (*units, *ahead):
            unit.is_free, unit.in_flight = False, unit in ahead
            self.whole.add(unit)
        self.most = max(self.most, sum(unit.padded for unit in self.whole))

    def leave(self, units: list[Any]) -> None:
        self.free([unit for unit in units if not soon_again(self.trace, unit, self.budgets)])

    def reduce(self, units: list[Any]) -> None:
        for unit in units:
            self.trace.visit(unit, "reduction")
        self.free(units)

    def free(self, units: list[Any]) -> None:
        for unit in units:
            unit.is_free = True
            self.whole.discard(unit)
