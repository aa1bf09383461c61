"""The trace: in which order an iteration uses and reduces its units, so that the next ones can be gathered ahead.

The first iteration records; later ones follow. An iteration that goes another way is recorded anew from that point; one
that stops early leaves the rest as it was.
DeepSpeed: deepspeed/runtime/zero/partitioned_param_coordinator.py.
"""

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Literal, Protocol, cast

from refimpl.zero.flat import Bucket
from refimpl.zero.gather.unit import Unit

Pass = Literal["forward", "backward", "reduction"]
AHEAD = 16  # uses in the trace that are looked at for prefetching


class Budgets(Protocol):
    """Elements: see `ZeroConfig`."""

    @property
    def prefetch_bucket_size(self) -> int: ...
    @property
    def max_live_parameters(self) -> int: ...
    @property
    def max_reuse_distance(self) -> int: ...


class Trace:
    """The recorded order of (unit, what for) and the place in it where this iteration is."""

    def __init__(self) -> None:
        self.order: list[tuple[Bucket, Pass]] = []
        self.at = 0

    def restart(self) -> None:
        """An iteration begins."""
        self.at = 0

    @property
    def next(self) -> tuple[Bucket, Pass] | None:
        """What comes next as far as recorded; None at the end."""
        return self.order[self.at] if self.at < len(self.order) else None

    @property
    def last(self) -> tuple[Bucket, Pass] | None:
        """What this iteration did last; None at its beginning."""
        return self.order[self.at - 1] if self.at else None

    def visit(self, bucket: Bucket, during: Pass) -> None:
        """This iteration uses or reduces `bucket` now."""
        if self.next != (bucket, during):
            self.order[self.at :] = [(bucket, during)]
        self.at += 1

    def ahead(self) -> Iterator[Unit]:
        """The units that are used next, as far as recorded."""
        rest = (self.order[at] for at in range(self.at, len(self.order)))
        return cast(Iterator[Unit], (bucket for bucket, during in rest if during != "reduction"))

    def distance(self, unit: Unit) -> int | None:
        """Elements to be gathered before `unit` is used again; None if it is not."""
        between: dict[int, int] = {}
        for other in self.ahead():
            if other is unit:
                return sum(between.values())
            if other.is_free:
                between[id(other)] = other.numel
        return None


def next_ones(trace: Trace, now: Collection[Unit], gathered: Collection[Unit], budgets: Budgets) -> list[Unit]:
    """What to prefetch beside the units needed now: the next of the trace that fit both budgets."""
    others = [unit for unit in gathered if unit not in now]
    flying = sum(u.padded for u in others if u.in_flight)
    live = sum(u.padded for u in (*others, *now))
    chosen: list[Unit] = []
    for unit in islice(trace.ahead(), AHEAD):
        if not unit.is_free or unit in now or unit in chosen:
            continue
        alone = not flying and budgets.prefetch_bucket_size > 0  # one may be larger than the budget
        flying, live = flying + unit.padded, live + unit.padded
        if (flying > budgets.prefetch_bucket_size and not alone) or live > budgets.max_live_parameters:
            break
        chosen.append(unit)
    return chosen


def soon_again(trace: Trace, unit: Unit, budgets: Budgets) -> bool:
    """Whether to keep a unit that a module is through with."""
    distance = trace.distance(unit) if budgets.max_reuse_distance else None
    return distance is not None and distance < budgets.max_reuse_distance
