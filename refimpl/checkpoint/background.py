"""Work that goes on while training does, one at a time; what it raises reaches the trainer at its next call.

A thread that dies alone tells nobody: a job would train for a day on checkpoints that are not written. So `wait` raises
what the work raised, the same object, with the traceback of where it happened. The thread is no daemon: Python waits
for it before it exits, so that a last save is not lost; what nobody asked for until then is printed.
"""

import sys
import threading
import traceback
import weakref
from collections.abc import Callable


class Background:
    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failures: list[BaseException] = []  # that nobody has heard of yet; one at most
        self.hopeless = threading.Event()  # what the work waits for will never come: for the work to ask
        self.unheard = False  # work was begun whose end the ranks have not yet told each other
        weakref.finalize(self, tell, self._failures)

    def start(self, do: Callable[[], object], name: str) -> None:
        """do() in a thread. Waits for the one before."""
        self.wait()
        self.hopeless.clear()
        self.unheard = True

        def run() -> None:
            try:
                do()
            except BaseException as error:
                self._failures.append(error)

        self._thread = threading.Thread(target=run, name=name)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether it has failed, and `wait` has not raised that yet."""
        return bool(self._failures)

    def settle(self) -> None:
        """Return when nothing is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Return when nothing is under way; raise what the work has raised, once."""
        self.settle()
        if self._failures:
            raise self._failures.pop()


def tell(failures: list[BaseException]) -> None:
    """At the end: what was never raised."""
    for failure in failures:
        print("work in the background failed, and nobody has waited for it:", file=sys.stderr)
        traceback.print_exception(failure)
