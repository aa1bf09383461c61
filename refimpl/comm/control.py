"""What the ranks of a group say to each other beside the data: what each calls, that all have come, small objects.

    the board      each rank's next call, seen by the ranks of its machine: before anything of it is sent
    the register   who is there, who has left, and who waits in vain
    the line       barriers and objects; on NCCL gloo's, beside the GPU's queue

None of it is charged to the ledger.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from refimpl.comm.agree import Agreed, Part
from refimpl.comm.board import Board
from refimpl.comm.objects import to_everyone
from refimpl.comm.patience import Patience
from refimpl.comm.process_group import ControlLine
from refimpl.comm.route import Route
from refimpl.comm.shared import Shared
from refimpl.ranks import here
from refimpl.ranks.register import Register
from refimpl.ranks.travel import dumps, loads


class Control:
    """A part of `Group`, which sets these."""

    rank: int
    size: int
    route: Route

    def __init__(self, handle: dist.ProcessGroup | None, backend: str) -> None:
        self.patience = Patience()
        self.ranks = (
            dist.get_process_group_ranks(handle) if handle else [dist.get_rank() if dist.is_initialized() else 0]
        )
        self._job_rank = self.ranks[handle.rank()] if handle else 0
        folder = here.of_job()
        self._board = Board(folder, handle.group_name, self.ranks, handle.rank()) if handle and folder else None
        self._register = Register.of_job()
        if self._register:
            self._register.enter()
        self._line = ControlLine(handle, backend) if handle else None

    def _agreed(self, what: str, tag: str, parts: Sequence[Part] = ()) -> Agreed:
        """What is begun only when no rank is seen to begin something else; `what` must be equal on all ranks."""
        board = self._board if self.size > 1 else None
        return Agreed(board, self._register, self.patience, self._job_rank, what, tag, parts)

    def last_call(self) -> str:
        """What this rank began last, for the reader of an error: "call 7, all_gather of 8 float32 at train.py:12"."""
        return self._board.mine() if self._board else "a collective"

    def last_calls(self) -> str:
        """What each rank began last in this group, for the reader of a job that seems to hang."""
        return self._board.standings() if self._board else ""

    def behind(self) -> list[int]:
        """The ranks of this group that are seen to have begun fewer calls than this one."""
        return self._board.behind() if self._board else []

    def elsewhere(self) -> dict[int, str]:
        """The ranks of this group that are seen in a call of another one, to which this has not come: that call."""
        return self._board.elsewhere() if self._board else {}

    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self._line is not None:
            self._refuse_parted()
            with self._agreed("barrier", "") as agreed:
                self._meet(agreed)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's picklable object, in rank order. For control, not for data: not charged to the ledger."""
        if self._line is None:
            return [obj] * self.size
        self._refuse_parted()
        agreed = self._agreed("all_gather_object", "")
        agreed.announce()
        with agreed:
            self._meet(agreed)
            said = to_everyone(self._line.handle, dumps(obj))
        return [loads(one) for one in said]

    def _refuse_parted(self) -> None:
        """Where data goes over the line too, the ranks' calls match there no more once something has parted them."""
        if self.route.backend == "gloo" and not isinstance(self.route.present, Shared):
            self.patience.refuse_lost()

    def _meet(self, agreed: Agreed) -> None:
        """Return when every rank has come here; meanwhile others may be asked."""
        assert self._line is not None
        meeting = dist.barrier(self._line.handle, async_op=True)
        if self.patience.lost is None:
            self.patience.wait(meeting, self.patience.begin(), agreed.is_late)
        else:
            meeting.wait()
