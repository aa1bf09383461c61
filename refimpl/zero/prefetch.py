"""The trace: in which order an iteration uses and reduces its units, so that the next ones can be gathered ahead.

The first iteration records; later ones follow. An iteration that goes another way is recorded anew from that point; one
that stops early leaves the rest as it was.
DeepSpeed: deepspeed/runtime/zero/partitioned_param_coordinator.py.
"""

from collections.abc import Iterator
from typing import Literal, cast

from refimpl.zero.flat import Bucket
from refimpl.zero.unit import Unit

Pass = Literal["forward", "backward", "reduction"]


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
