"""Collectives that this rank's own thread does: all under way go on, as far as they can, whenever it comes by.

A task is a generator that yields what it waits for, a `Need`, and goes on once that is met. The thread comes by when it
begins a collective of the group and when it waits for one. Where it stays away and something is under way, a helper
comes by in its place: peers that wait for this rank's part of a sum must not wait until it has computed, or for ever if
it waits for a message, a file or a call of torch's that they begin later.
"""

import math
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch

from refimpl.comm import mode
from refimpl.comm.helper import Helper, Lock
from refimpl.comm.patience import SHORT, pause
from refimpl.comm.signals import LOOKS, Need, Watch

PATIENCE = 0.05  # seconds a rank sleeps before it looks whether the peer is alive


class Task:
    """One collective under way: steps that go on once a need is met."""

    def __init__(self, tasks: "Tasks", steps: Iterator[Need]) -> None:
        self.tasks, self.steps = tasks, steps
        self.inference = torch.is_inference_mode_enabled()  # where it was begun: others may take it on
        self.need: Need | None = None
        self.error: Exception | None = None
        self.over = False
        self.awaited: float | None = None  # since when (time.monotonic())

    def advance(self) -> None:
        """Go as far as possible without waiting."""
        while not self.over and (self.need is None or self.tasks.watch.met(self.need)):
            try:
                with mode.inference(self.inference):
                    self.need = next(self.steps)
            except StopIteration:
                self.over = True
            except Exception as error:  # whoever waits for this collective is told, not whoever waits for another
                self.over, self.error = True, error

    def fail(self, error: Exception) -> None:
        """What it waits for will never come; unless somebody has ended it meanwhile."""
        with self.tasks.lock:
            if not self.over:
                self.over, self.error = True, error

    def wait(self, limit: timedelta | None = None) -> None:
        """As torch's: RuntimeError if it is not over within the limit, and may be waited for again."""
        if not self.tasks.finish(self, limit):
            raise RuntimeError("the collective is not over yet")
        if self.error:
            raise self.error

    def is_completed(self) -> bool:
        return self.over


class Tasks:
    """All that are under way in one group, the oldest first. `lock`: of these and of what their steps touch.

    longest: a task that is waited for longer has failed, as torch's own does: a peer that hangs holds nobody for ever.
    """

    def __init__(self, watch: Watch, longest: timedelta | None = None) -> None:
        self.watch, self.longest = watch, math.inf if longest is None else longest.total_seconds()
        self.lock: Lock = threading.RLock()
        self._under_way: list[Task] = []
        self._helper = Helper(self)

    def begin(self, steps: Iterator[Need]) -> list[Task]:
        """One more; a list, as a step of `Work` returns."""
        task = Task(self, steps)
        with self.lock:
            self._under_way.append(task)
            if self.advance():
                self._helper.call()
        self._helper.seen = time.monotonic()
        return [task]

    def advance(self) -> bool:
        """Each as far as it goes without waiting. Whether some are left under way."""
        with self.lock:
            for task in self._under_way:
                task.advance()
            self._under_way = [task for task in self._under_way if not task.over]
            return bool(self._under_way)

    def finish(self, task: Task, limit: timedelta | None = None) -> bool:
        """Go on with all that is under way until this is over; False if it is not within the limit."""
        now = time.monotonic()
        end = math.inf if limit is None else now + limit.total_seconds()
        since, looks = task.awaited or now, LOOKS
        task.awaited = since
        while not task.over and (now := time.monotonic()) < end:
            self.advance()
            self._helper.seen = now
            if not task.over and (need := task.need):
                shortest = PATIENCE if len(self._under_way) == 1 else SHORT
                try:
                    self.watch.wait(need, min(pause(now - since, shortest), end - now), looks)
                except RuntimeError as error:  # the peer has ended: this is no limit that was over
                    task.fail(error)
                looks = 0
                if now - since >= self.longest:
                    said = f"timed out waiting, after the process group's timeout of {self.longest:.0f} s"
                    task.fail(RuntimeError(said))
        return task.over
