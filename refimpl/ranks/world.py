"""A world of N ranks, seen from its caller: start them, call functions on them, say what went wrong, stop them.

One failure seldom comes alone: when a rank dies, the others lose their connections, and when it raises, they wait for
it for ever. What is raised here is the first failure that is not such a consequence.
"""

import atexit
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from refimpl.ranks import folder, here
from refimpl.ranks.environment import without_place
from refimpl.ranks.errors import Failed, RankError, RankTimeout, end_of_grace, failed
from refimpl.ranks.meet import devices_of, tell_if_too_few
from refimpl.ranks.rank import Rank, Setup
from refimpl.ranks.server import ended, has_ended, start_server
from refimpl.ranks.silence import Silence
from refimpl.ranks.stand import Lonely, lines, stand
from refimpl.ranks.travel import dumps, loads

T = TypeVar("T")
OnReport = Callable[[int, Any], object]
OnOutput = Callable[[int, str, str], object]

_CONTEXT = multiprocessing.get_context("forkserver")
_HIDING = threading.Lock()  # of `__main__`: of two threads that did it at once one would bring back the other's
_ALONE = 1.0  # seconds between two looks at ranks that wait while others have returned
_TOGETHER = 5.0  # ... at ranks that all wait
_START = 120.0  # seconds a world may take to start: the very first waits until the server has imported torch


class World:
    """N ranks that stay: each `call` runs a function on all of them. Use it in a `with` statement, or `stop()` it.

    After a call in which every rank returned or raised, the world is ready for the next. When a rank died, still waits
    for one that failed, or has begun collectives that another never will, all are killed and `alive` is False; on NCCL
    also when one only raised.

    Calls are jobs of their own: each finds torch's settings (gradients on, default dtype, threads, ...) and the seeds
    of torch, random and numpy as the first did, and process groups that the last call made are gone.
    keep_settings=True leaves all of it as the last call did, as in a session.
    compare=False: the ranks do not compare their calls of `Group` (see `refimpl.comm.board`), as gloo alone.
    """

    def __init__(
        self,
        ranks: int = 2,
        *,
        device: str = "auto",
        threads: int = 1,
        keep_settings: bool = False,
        compare: bool = True,
    ) -> None:
        if ranks < 1:
            raise ValueError(f"ranks must be at least 1, not {ranks}")
        backend, devices = devices_of(ranks, device)
        tell_if_too_few(ranks, device)
        directory, handle = folder.make()
        self._let_go = weakref.finalize(self, os.close, handle)
        environment = _environment(ranks, threads)
        environment[here.VARIABLE] = str(directory) if compare else ""
        self.setup = Setup(ranks, backend, devices, threads, directory, environment, keep_settings)
        self.alive = True  # until stopped
        self.idle = False  # every rank waits for the next call
        self.processes: list[Rank] = []
        self.pipes: list[Connection] = []
        self.lives: list[Connection] = []  # of each rank: it closes when this process ends
        self.owner = os.getpid()  # a child that it forks inherits this object, not the ranks
        atexit.register(self.kill)  # before multiprocessing's own exit, which would wait for the ranks
        try:
            self._start()
            self._collect(_START, None, _print)
        except BaseException:
            self.kill()
            raise

    def call(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout: float | None = 60,
        on_report: OnReport | None = None,
        on_output: OnOutput | None = None,
    ) -> list[T]:
        """fn(*args) on every rank; see `launch.run`. on_output(rank, "stdout" | "stderr", text) replaces printing.

        Time that the machine had no CPU for the ranks does not count (`silence.py`).
        RankTimeout too, within seconds, if all ranks that have not returned stand in collectives in which the others
        will never join them. KeyboardInterrupt carries where each rank stands as a note. TypeError if fn or an argument
        cannot be pickled, RuntimeError if the ranks were stopped or are in a call: nothing was called then.
        """
        if not self.alive:
            raise RuntimeError("this world's ranks were stopped: start a new World")
        if not self.idle:
            raise RuntimeError("this world's ranks are in another call: wait until it has returned")
        try:
            message = dumps((fn, args))
        except Exception as error:
            raise TypeError(f"what the ranks are given cannot be pickled: {error}. Make it inside fn") from error
        self.idle = False
        try:
            for pipe in self.pipes:
                with suppress(ConnectionError):  # a rank that died since: collecting says how
                    pipe.send_bytes(message)
            return self._collect(timeout, on_report, on_output or _print)
        finally:
            if not self.idle:
                self.kill()

    def stop(self) -> None:
        """Let idle ranks leave, within 5 s in all; kill the others. One that waits inside a library may never leave."""
        if self.idle and os.getpid() == self.owner:
            for pipe in self.pipes:
                with suppress(ConnectionError):
                    pipe.send_bytes(b"")
            until = time.monotonic() + 5
            for process in self.processes:
                process.join(max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End every rank now, and the processes that it started. Nothing in a child that this process has forked."""
        if os.getpid() != self.owner:
            return
        self.alive = self.idle = False
        for process in self.processes:
            _end_group(process)
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in (*self.pipes, *self.lives):
            pipe.close()
        shutil.rmtree(self.setup.directory, ignore_errors=True)
        self._let_go()
        atexit.unregister(self.kill)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        with _without_main():
            start_server()
            for number in range(self.setup.ranks):
                (mine, its), (its_life, life) = _CONTEXT.Pipe(), _CONTEXT.Pipe(duplex=False)
                self.pipes.append(mine)
                self.lives.append(life)
                with its, its_life:
                    process = Rank(number, self.setup, its, its_life)
                    try:
                        process.start()
                    except (EOFError, ConnectionError) as error:
                        raise ended() from error
                self.processes.append(process)

    def _collect(self, timeout: float | None, on_report: OnReport | None, on_output: OnOutput) -> list[Any]:
        """One result of each rank, in rank order; else the failure that explains the others is raised."""
        results: dict[int, Any] = {}
        failures: list[Failed] = []
        pending = set(range(self.setup.ranks))
        patience = math.inf if timeout is None else timeout
        silence, lonely = Silence(self.processes, patience), Lonely(self.processes, _ALONE, _TOGETHER)
        try:
            while pending and time.monotonic() < (end := end_of_grace(failures) if failures else silence.ends):
                for rank, kind, value in self._messages(pending, min(end, lonely.asks_at(silence.began, results))):
                    if kind in ("stdout", "stderr"):
                        on_output(rank, kind, value)  # no sign of life: what prints without end is a hang too
                        continue
                    silence.broken()
                    if kind == "report":
                        if on_report:
                            on_report(rank, value)
                    else:
                        pending.discard(rank)
                        if kind == "result":
                            results[rank] = value
                        else:
                            failures.append(failed(rank, value))
                if pending and not failures and time.monotonic() >= lonely.asks_at(silence.began, results):
                    lonely.refuse(results, lambda: self._stand(pending, last=False))
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(lines(self._stand(pending, last=True)))
            raise
        in_step = not any(failure.out_of_step for failure in failures)
        # After a failure NCCL may wait on a GPU for ever, for a collective that not every rank has entered.
        usable = in_step and (not failures or self.setup.backend != "nccl")
        self.idle = usable and not pending and all(process.is_alive() for process in self.processes)
        if failures:
            raise min(failures, key=Failed.order).error
        if pending:
            text = f"no rank gave a result or a report for {patience:g} s"
            raise RankTimeout(f"{text}\n{lines(self._stand(pending, last=True))}")
        return [results[rank] for rank in range(self.setup.ranks)]

    def _messages(self, pending: set[int], deadline: float) -> Iterator[tuple[int, str, Any]]:
        """Waits until a pending rank speaks or the deadline passes; yields (rank, kind, value) of each that spoke."""
        sources: dict[Any, int] = {self.pipes[rank]: rank for rank in pending}
        sources |= {self.processes[rank].sentinel: rank for rank in pending}
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        for rank in sorted({sources[source] for source in wait(list(sources), left)}):
            yield rank, *self._message(rank)

    def _message(self, rank: int) -> tuple[str, Any]:
        with suppress(EOFError, ConnectionError):
            if self.pipes[rank].poll():
                message = self.pipes[rank].recv_bytes()
                try:
                    kind, value = loads(message)
                except Exception as error:
                    raise RankError(f"what rank {rank} sent cannot be unpickled here: {error!r}", rank) from error
                return kind, value
        self.processes[rank].join(5)
        if has_ended(self.processes[rank]):
            raise ended()
        _end_group(self.processes[rank])
        return "died", self.processes[rank].exitcode

    def _stand(self, pending: set[int], last: bool) -> dict[int, str]:
        return stand(self.setup, self.processes, self.lives, pending, last)


def _end_group(process: Rank) -> None:
    """Kill a rank and what it started: its process group, which outlives the rank that led it."""
    if process.pid:
        # No such group: all have ended, or the rank is so young that it leads none. macOS refuses one of zombies.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _environment(ranks: int, threads: int) -> dict[str, str]:
    """This process's environment for the ranks (the server still has that of its own start), less a launcher's."""
    kept = without_place(os.environ)
    kept.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")  # not by the host's name
    return kept | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": str(threads)}


def _print(rank: int, stream: str, text: str) -> None:
    file = sys.stdout if stream == "stdout" else sys.stderr
    file.write(text)
    file.flush()


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide `__main__`, which multiprocessing would import again in each rank."""
    with _HIDING:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
