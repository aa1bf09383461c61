"""A collective that is logged: it is waited for at once, so that its latency is the transfer's and nothing else's.

That ends overlap while the log is on, as in DeepSpeed. Messages between two ranks are not waited for, which could
block both; their latency reaches to where somebody waits. The names are DeepSpeed's for the same transfer. `prof_ops`
may name that, `Group`'s own, or the ledger's tag.
"""

import time
from typing import TYPE_CHECKING

from torch import Tensor

from refimpl.measure.comms_log import CommsLog

if TYPE_CHECKING:
    from refimpl.comm.group import Group

NAMES = {
    "reduce_scatter": "reduce_scatter_tensor",
    "all_gather": "all_gather_into_tensor",
    "all_to_all": "all_to_all_single",
}
MESSAGES = ("send", "recv")
FRAMES = 3  # between `begin` and who called the group's method: begin, Group._run, Group.all_reduce


class Logged:
    """One call under way, from its first transfer to its last."""

    def __init__(self, log: CommsLog, group: "Group", op: str, name: str, message: Tensor) -> None:
        self.log, self.group, self.op, self.name = log, group, op, name
        self.size = message.numel() * message.element_size()
        self.waits = op not in MESSAGES
        group.settle()  # on a GPU: what was queued before is not this call's time
        self.begun = time.perf_counter_ns()

    def end(self) -> None:
        """The result is there."""
        self.group.settle()
        ms = max(1, time.perf_counter_ns() - self.begun) / 1e6
        self.log.append(self.op, self.name, ms, self.size, self.group.size)


def begin(group: "Group", op: str, tag: str, message: Tensor) -> Logged | None:
    """None if the group's log does not want the call, or the group has one rank. `message`: what it is given."""
    log, known = group.ledger.log, NAMES.get(op, op)
    if log is None or group.size == 1 or not log.wants(known, op, tag):
        return None
    return Logged(log, group, known, log.name(known, FRAMES), message)
