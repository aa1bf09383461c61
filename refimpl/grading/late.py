"""A transfer that ends when somebody waits for it, and not before: what is done too early shows in every run alike.

It goes between copies. Until `wait` what is to be filled is blank, in floats NaN, and neither that nor what is sent may
change. So a result that is read too early is wrong, also where gloo happens to be fast.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from refimpl.comm.work import Work
from refimpl.grading.compare import require

# Signalling NaN: any sum makes a quiet one of it, so that `x += 1` changes blank memory too.
BLANK = {
    torch.float16: (torch.int16, 0x7D00),
    torch.bfloat16: (torch.int16, 0x7FA0),
    torch.float32: (torch.int32, 0x7FA00000),
    torch.float64: (torch.int64, 0x7FF4 << 48),
}


class Late(Work):
    """One call of a collective: under way from `begin` to `wait`."""

    def __init__(self, what: str, filled: Sequence[Tensor], sent: Sequence[Tensor]):
        """What is sent may lie in what is filled."""
        super().__init__()
        self.what, self.is_done, self.fills = what, False, len(filled)
        with _disable_current_modes():  # a grader's mode that looks at what the answer makes
            self.own = [t.detach() for t in (*filled, *sent)]  # the answer's own
            self.copies = [t.clone() for t in self.own]
            for t in self.own[: self.fills]:
                dtype, blank = BLANK.get(t.dtype, (torch.uint8, 0xFF))
                t.view(-1).view(dtype).fill_(blank)
            for t, copy in list(zip(self.own, self.copies, strict=True))[self.fills :]:
                t.copy_(copy)
            self.before = [of_bytes(t).clone() for t in self.own]

    def begin(self, call: Callable[..., Work]) -> Work:
        """call(*filled, *sent) begins it, here on copies."""
        self.work = call(*self.copies)
        return self

    def memory(self) -> list[Tensor]:
        """What is the grader's, and no fault of the answer."""
        return [*self.copies, *self.before]

    def wait(self) -> None:
        """It is done now; again: nothing. Wrong if memory that had to rest has changed."""
        if self.is_done:
            return
        self.is_done = True
        self.work.wait()
        early = f"memory changed while {self.what} was under way in it: until work.wait() it must rest"
        with _disable_current_modes():
            for t, before in zip(self.own, self.before, strict=True):
                freed = t.untyped_storage().nbytes() < len(before)
                require(not freed and torch.equal(of_bytes(t), before), early)
            for t, copy in list(zip(self.own, self.copies, strict=True))[: self.fills]:
                t.copy_(copy)
        self.own, self.copies, self.before = [], [], []


def of_bytes(t: Tensor) -> Tensor:
    """The memory of a contiguous tensor: uint8 [its bytes]."""
    return t.view(-1).view(torch.uint8)
