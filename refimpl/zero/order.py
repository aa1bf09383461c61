"""The roll call: ranks say what they are about to do before they do it, so that a wrong turn is named, not a hang.

Collectives match by position only. A rank that skips a module pairs its next gather with another rank's gather of
something else: with equal sizes the weights are silently wrong, with different ones the job hangs until a timeout that
names nothing (DeepSpeed issues 7998, 5828). So each collective of ZeRO-3 is announced in a message of 128 bytes that
says what it is for, on a line of their own, and no rank waits for the collective before it has heard that all announced
the same. Cost: 128 (N-1) bytes a rank for each gather; `check_order=False` leaves it out.
"""

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from refimpl.comm.group import Group
from refimpl.comm.work import Work

MESSAGE = 128  # bytes: a checksum of the whole text, then as much of its end as fits
CHECKSUM = 4


class RankDivergence(RuntimeError):
    """Ranks reached different collectives at the same point."""


class RollCall:
    """`roll_call("gathers h.3")` on every rank; waiting for what it returns raises RankDivergence on every rank.

    `note` announces with the next call, at no cost of its own; who waits for it before there was one makes it.
    """

    def __init__(self, group: Group, enabled: bool = True) -> None:
        self.enabled = enabled and group.size > 1
        self.line = own_line(group) if self.enabled else group
        self._notes: list[str] = []
        self._unheard: list[Work] = []  # calls that nobody may have waited for
        self._next = NextCall(self)

    def __call__(self, what: str) -> Work:
        if not self.enabled:
            return Work()
        text = "; ".join([*self._notes, what]).encode()
        message = zlib.crc32(text).to_bytes(CHECKSUM) + text[-(MESSAGE - CHECKSUM) :]
        mine = torch.frombuffer(bytearray(message.ljust(MESSAGE, b" ")), dtype=torch.uint8)  # [128]
        everyones = torch.empty(self.line.size, MESSAGE, dtype=torch.uint8)  # [N, 128]
        said = self.line.all_to_all(everyones, mine.repeat(self.line.size, 1), async_op=True, tag="roll call")
        call = Work(iter((lambda: [said], lambda: compare(everyones, mine))))
        self._unheard.append(call)
        self._next.call = call
        self._notes, self._next = [], NextCall(self)
        return call

    def hear(self) -> None:
        """Wait for every call so far: nothing stays open from one iteration to the next."""
        for call in self._unheard:
            call.wait()
        self._unheard.clear()

    def note(self, what: str, begun: Work) -> Work:
        """`begun`, a collective for `what`, for which nobody waits before the next roll call is heard."""
        if not self.enabled:
            return begun
        self._notes.append(what)
        heard = self._next
        return Work(iter((lambda: [heard, begun],)))


class NextCall:
    """The roll call after this moment."""

    def __init__(self, roll_call: RollCall) -> None:
        self.roll_call = roll_call
        self.call: Work | None = None

    def wait(self) -> None:
        (self.call or self.roll_call("waits")).wait()


def compare(everyones: Tensor, mine: Tensor) -> list[Any]:
    """everyones [N, 128], mine [128]. RankDivergence if not all are the same; else nothing to wait for."""
    if bool((everyones != mine).any()):
        said = [bytes(row.tolist())[CHECKSUM:].decode(errors="replace").rstrip() for row in everyones]
        ranks = "; ".join(f"rank {r}: {text}" for r, text in enumerate(said))
        raise RankDivergence(
            f"the ranks take different paths through the model. {ranks}. ZeRO-3 needs every rank to run the same "
            "modules in the same order: make the branch depend on something that is equal on all ranks"
        )
    return []


def own_line(group: Group) -> Group:
    """A gloo group of the same ranks for host tensors, on which small messages do not queue behind large ones."""
    assert group.handle is not None
    ranks = dist.get_process_group_ranks(group.handle)
    handle = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return Group(handle, group.ledger, torch.device("cpu"))
