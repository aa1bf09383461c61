"""Collectives that go on behind the back of whoever began them: one thread does them, in the order of the calls.

A collective of several steps needs somebody who starts the next step when the last has arrived. A training step's own
thread would be late for that: it looks when it launches its next bucket. Here a thread of its own waits in the
library, which lets Python's lock go, and goes on at once, as NCCL's proxy thread does. One after another, in the order
in which they were begun, is what keeps all ranks in step: the order in which somebody waits for them does not matter.
"""

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any
from weakref import WeakValueDictionary

import torch

Job = Callable[[], list[Any]]  # returns the transfers that it has started and not waited for


class Task:
    """One collective: begun, and over when its thread has done it, and what that has left under way."""

    def __init__(self, job: Job) -> None:
        self._job: Job | None = job
        self._inference = torch.is_inference_mode_enabled()  # of its caller: each thread is in one or not
        self._over = threading.Event()
        self._left: list[Any] = []
        self._error: BaseException | None = None

    def run(self, failed: BaseException | None) -> BaseException | None:
        """By the thread. What it raises is for whoever waits, and is what `failed` for all that come after it.

        None of those is begun: the other ranks are still in this one, and would take the next for it.
        """
        job, self._job = self._job, None
        try:
            if failed is not None:
                raise failed
            assert job is not None
            with torch.inference_mode(self._inference):
                self._left = job()
        except BaseException as error:
            self._error = error
        self._over.set()
        return self._error

    def is_completed(self) -> bool:
        return self._over.is_set() and all(handle.is_completed() for handle in self._left)

    def wait(self, limit: timedelta | None = None) -> None:
        """As torch's: RuntimeError if it is not over within the limit, and may be waited for again."""
        if not self._over.wait(None if limit is None else limit.total_seconds()):
            raise RuntimeError("the collective is not over yet")
        if self._error is not None:
            raise self._error
        for handle in self._left:
            handle.wait() if limit is None else handle.wait(limit)


class Behind:
    """The thread and what it has still to do. It begins with the first job, and ends with this object."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Task | None] = SimpleQueue()
        self._started = False

    def begin(self, job: Job) -> Task:
        """Do this when all before it is done."""
        if not self._started:
            self._started = True
            weakref.finalize(self, self._jobs.put, None)
            threading.Thread(target=_work, args=(self._jobs,), name="refimpl-collectives", daemon=True).start()
        task = Task(job)
        self._jobs.put(task)
        return task

    def call(self, job: Callable[[], object]) -> None:
        """Do this when all before it is done, and return."""

        def done() -> list[Any]:
            job()
            return []

        self.begin(done).wait()


_OF: WeakValueDictionary[str, Behind] = WeakValueDictionary()


def behind(group: str) -> Behind:
    """Whose thread does what is begun in torch's group of this name, for all who use it: they share its order."""
    return _OF.setdefault(group, Behind())


def _work(jobs: "SimpleQueue[Task | None]") -> None:
    failed: BaseException | None = None
    while (task := jobs.get()) is not None:
        failed = task.run(failed)
        del task  # and what it holds, while the next is waited for
