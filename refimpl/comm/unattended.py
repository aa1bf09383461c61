"""All-reduces that go on by themselves, of a library whose own are composed of transfers that somebody must start.

gloo's is two transfers with additions between them. Who does not wait computes meanwhile, and starts nothing. So a
thread does all of it (see `behind.py`), in a process group of its own: calls of one group are matched by their order.
NCCL does the same with a stream and a proxy thread.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from refimpl.comm.behind import Behind
from refimpl.comm.collectives import Op
from refimpl.comm.work import Steps

AllReduce = Callable[[Tensor, Op], int]  # returns the bytes that it has sent over slow links


class Unattended:
    """The thread, and what it calls."""

    def __init__(self) -> None:
        self._behind = Behind()
        self._by: AllReduce | None = None
        self._crossed = 0  # bytes over slow links of those that are over, not yet asked for

    def all_reduce(self, x: Tensor, op: Op, make: Callable[[], AllReduce]) -> Steps:
        """x [n] -> its reduction, in place, by what `make` makes for the first: that is a collective of its own."""
        crossed: list[int] = []

        def begin() -> list[Any]:
            by = self._by = self._by or make()
            return [self._behind.begin(lambda: crossed.append(by(x, op)))]

        yield begin
        self._crossed += sum(crossed)

    def crossed(self) -> int:
        """Bytes over slow links of those that have ended since it was asked last."""
        crossed, self._crossed = self._crossed, 0
        return crossed
