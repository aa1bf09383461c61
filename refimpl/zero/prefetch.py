"""The trace: in which order a training iteration uses its units, so that the next ones can be gathered ahead.

The first iteration records; later ones follow. An iteration that goes another way is recorded anew from that point; one
that stops early (an evaluation: forward only) leaves the rest as it was.
DeepSpeed: deepspeed/runtime/zero/partitioned_param_coordinator.py.
"""

from collections.abc import Iterator
from typing import Literal

from refimpl.zero.unit import Unit

Pass = Literal["forward", "backward"]


class Trace:
    """The recorded order of (unit, pass) and the place in it where this iteration is."""

    def __init__(self) -> None:
        self.order: list[tuple[Unit, Pass]] = []
        self.at = 0

    def restart(self) -> None:
        """An iteration begins."""
        self.at = 0

    def visit(self, unit: Unit, during: Pass) -> None:
        """This iteration uses `unit` now."""
        if self.order[self.at : self.at + 1] != [(unit, during)]:
            self.order[self.at :] = [(unit, during)]
        self.at += 1

    def ahead(self, forward_only: bool = False) -> Iterator[Unit]:
        """The units that come next, as far as recorded."""
        for unit, during in self.order[self.at :]:
            if not (forward_only and during == "backward"):
                yield unit

    def distance(self, unit: Unit) -> int | None:
        """Elements to be gathered before `unit` is used again; None if it is not."""
        between: dict[int, int] = {}
        for other, _ in self.order[self.at :]:
            if other is unit:
                return sum(between.values())
            if other.is_free:
                between[id(other)] = other.numel
        return None
