"""Collectives that go on behind the back of whoever began them: one thread does them, in the order of the calls.

A collective of several steps needs somebody who starts the next step when the last has arrived. A training step's own
thread would be late for that: it looks when it launches its next bucket. Here a thread of its own waits in the
library, which lets Python's lock go, and goes on at once, as NCCL's proxy thread does. One after another, in the order
in which they were begun, is what keeps all ranks in step: the order in which somebody waits for them does not matter.
It speaks in process groups that nobody else uses: calls of one group are matched by their order.
"""

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue

from refimpl.comm.work import Steps

Job = Callable[[], object]


class Task:
    """One collective: begun, and over when its thread has done it."""

    def __init__(self, job: Job) -> None:
        self._job: Job | None = job
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """By the thread. What it raises is for whoever waits."""
        job, self._job = self._job, None
        try:
            assert job is not None
            job()
        except BaseException as error:
            self._error = error
        self._over.set()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, limit: timedelta | None = None) -> None:
        """As torch's: RuntimeError if it is not over within the limit, and may be waited for again."""
        if not self._over.wait(None if limit is None else limit.total_seconds()):
            raise RuntimeError("the collective is not over yet")
        if self._error is not None:
            raise self._error


class Behind:
    """The thread and what it has still to do. It begins with the first job, and ends with this object."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Task | None] = SimpleQueue()
        self._started = False
        self._crossed = 0  # bytes over slow links of the collectives that are over, not yet asked for

    def begin(self, job: Job) -> Task:
        """Do this when all before it is done."""
        if not self._started:
            self._started = True
            weakref.finalize(self, self._jobs.put, None)
            threading.Thread(target=_work, args=(self._jobs,), name="refimpl-collectives", daemon=True).start()
        task = Task(job)
        self._jobs.put(task)
        return task

    def do(self, job: Callable[[], int], before: Callable[[], None] = lambda: None) -> Steps:
        """The one step of a collective. `before` is for its caller; `job` returns its bytes over slow links."""
        crossed: list[int] = []

        def start() -> list[Task]:
            before()
            return [self.begin(lambda: crossed.append(job()))]

        yield start
        self._crossed += sum(crossed)

    def crossed(self) -> int:
        """Bytes over slow links of the collectives that have ended since it was asked last."""
        crossed, self._crossed = self._crossed, 0
        return crossed

    def call(self, job: Job) -> None:
        """Do this when all before it is done, and return."""
        self.begin(job).wait()


def _work(jobs: "SimpleQueue[Task | None]") -> None:
    while (task := jobs.get()) is not None:
        task.run()
        del task  # and what it holds, while the next is waited for
