"""One backward pass, as a stage sees it: it begins with the first sign of it and ends when autograd is through.

    closed -> (`sign`: a hook runs inside backward) -> open -> (autograd's callback) -> closed: `end`
                                                       open -> (the backward raised) -> found open later: `drop`

So `loss.backward()` is enough; nobody has to say when backward begins or ends. Re-entrant checkpointing runs one
backward inside another: the inner one's end is not the pass's. If only inner ones gave a sign, the pass stays open
until the next forward, `zero_grad` or `step` closes it.
torch: torch/nn/parallel/distributed.py and fsdp/_fully_shard/_fsdp_state.py queue their end on the same callback.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class BackwardPass:
    """Calls `begin()` at the first sign, `end(asked)` at the end, `drop()` when backward ended in an exception.

    `asked`: whether the pass was opened by `explicit`, so that every rank has it, even one whose loss uses nothing.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[bool], None], drop: Callable[[], None]) -> None:
        self.begin, self.end, self.drop = begin, end, drop
        self.is_open = False
        self._queued = False  # whether autograd will call back
        self._asked = False  # inside `explicit`

    def sign(self, *_: Any) -> None:
        """Every hook that runs inside backward calls this first."""
        if not self.is_open:
            self.is_open = True
            self.begin()
        if not self._queued and not self._asked:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._autograd_is_through)

    @contextmanager
    def explicit(self) -> Iterator[None]:
        """A pass that begins and ends with the block."""
        self.settle()
        self._asked = self.is_open = True
        try:
            self.begin()
            yield
            self.end(True)
        except BaseException:
            self.drop()
            raise
        finally:
            self._asked = self.is_open = False

    def settle(self) -> bool:
        """Between two passes: close one that is still open. False if its backward ended in an exception."""
        if not self.is_open or self._asked or in_backward():
            return True
        interrupted, self._queued = self._queued, False
        if interrupted:
            self.is_open = False
            self.drop()
        else:
            self._close()
        return not interrupted

    def _autograd_is_through(self) -> None:
        self._queued = False
        if not _inside_another():
            self._close()

    def _close(self) -> None:
        self.is_open = False
        self.end(False)


def in_backward() -> bool:
    """Whether autograd is running this thread's code now: a hook, or the forward that a checkpoint runs again."""
    return torch._C._current_graph_task_id() != -1


def refuse_inside(what: str) -> None:
    """RuntimeError inside backward: the gradients of this pass are still on their way."""
    if in_backward():
        raise RuntimeError(f"{what} inside backward, by a hook, where gradients are on their way: call it behind it")


def _inside_another() -> bool:
    """Whether the backward that ends now was started by a node of another one."""
    frame, running = sys._getframe(), 0
    while frame.f_back is not None:
        running += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    # On CUDA hooks run in a thread of autograd's own, whose outermost backward has its frame in another thread.
    own_thread = isinstance(threading.current_thread(), threading._DummyThread)
    return running > (0 if own_thread else 1)
