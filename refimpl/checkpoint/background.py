"""Work that goes on while training does, one at a time; what it raises reaches the trainer at its next call.

A thread that dies alone tells nobody: a job would train for a day on checkpoints that are not written. So `check`
(every step) and `wait` (every save and load) raise what the work raised, the same object, with the traceback of where
it happened. The thread is no daemon: Python waits for it before it exits, so that a last save is not lost.
"""

import threading
from collections.abc import Callable


class Background:
    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, do: Callable[[], object], name: str) -> None:
        """do() in a thread. Waits for the one before."""
        self.wait()

        def run() -> None:
            try:
                do()
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=run, name=name)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise what the work has raised, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Return when nothing is under way; raise as `check` does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
