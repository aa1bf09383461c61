"""A collective that is logged: it is waited for at once, so that its latency is the transfer's and nothing else's.

That ends overlap while the log is on, as in DeepSpeed. Messages between two ranks are not waited for, which could
block both; their latency reaches to where somebody waits. The names are DeepSpeed's for the same transfer. `prof_ops`
may name that, `Group`'s own, or the ledger's tag.
"""

import time
from collections.abc import Callable

from torch import Tensor

from refimpl.measure.comms_log import CommsLog

NAMES = {
    "reduce_scatter": "reduce_scatter_tensor",
    "all_gather": "all_gather_into_tensor",
    "all_to_all": "all_to_all_single",
}
MESSAGES = ("send", "recv")
FRAMES = 3  # between `entered` and who called the group's method: entered, Group._run, Group.all_reduce


class Logged:
    """One call under way, from its first transfer to its last."""

    def __init__(
        self, log: CommsLog, op: str, name: str, message: Tensor, ranks: int, settle: Callable[[], None]
    ) -> None:
        self.log, self.op, self.name, self.ranks, self.settle = log, op, name, ranks, settle
        self.size = message.numel() * message.element_size()
        self.waits = op not in MESSAGES
        settle()  # on a GPU: what was queued before is not this call's time
        self.begun = time.perf_counter_ns()

    def end(self) -> None:
        """The result is there."""
        self.settle()
        ms = max(1, time.perf_counter_ns() - self.begun) / 1e6
        self.log.append(self.op, self.name, ms, self.size, self.ranks)


def entered(log: CommsLog, op: str, tag: str, message: Tensor, ranks: int, settle: Callable[[], None]) -> Logged | None:
    """None if the log does not want the call, or it is of one rank. `message`: what the call is given.

    `settle` returns when the device has done what it was given.
    """
    known = NAMES.get(op, op)
    if ranks == 1 or not log.wants(known, op, tag):
        return None
    return Logged(log, known, log.name(known, FRAMES), message, ranks, settle)
