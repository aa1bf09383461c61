"""The life of one rank: a process that joins a process group, then calls whatever its caller sends until told to leave.

A rank never writes to the terminal itself: its output, reports, results and errors travel to the caller on one pipe,
so they arrive in order and whole. It dies with its caller, however that dies: a thread waits on a pipe which the
operating system closes when the caller is gone, and on which the caller asks where the rank stands.
"""

import datetime
import faulthandler
import io
import mmap
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

if sys.platform == "win32":
    raise ImportError("refimpl starts its ranks through a fork server, which Windows lacks: use Linux, macOS or WSL")
from multiprocessing.context import ForkServerProcess

from refimpl.ranks import flight, folder, life
from refimpl.ranks.allocator import keep_freed_memory
from refimpl.ranks.lost import is_echo
from refimpl.ranks.settings import Settings
from refimpl.ranks.travel import dumps, loads, survives

# gloo never gives up by itself: it is the caller who notices a hang, and can say where each rank stands. So it does on
# NCCL, whose watchdog stays on watch, with torch's own limit: it ends a rank that nobody else would.
_TIMEOUT = {"gloo": datetime.timedelta(days=365), "nccl": None}
STACKS, FLIGHT = b"stacks", b"flight"  # what the caller may ask: each thread's stack, or the unfinished collective


@dataclass(frozen=True)
class Setup:
    """What the ranks of one world have in common."""

    ranks: int
    backend: str  # "gloo" | "nccl"
    devices: list[str]  # of each rank: "cpu" | "cuda:0"
    threads: int
    directory: Path  # for the rendezvous file, the stacks and the boards
    environment: dict[str, str]
    keep_settings: bool  # from call to call: torch's settings, the seeds, process groups

    def stack_file(self, rank: int) -> Path:
        return self.directory / f"stack{rank}"

    def flight_file(self, rank: int) -> Path:
        return self.directory / f"flight{rank}"


@dataclass(frozen=True)
class Failure:
    """An exception on its way from a rank to its caller."""

    title: str  # "ValueError: shard 3 is empty"
    trace: traceback.TracebackException | str  # its source lines are looked up by the caller, who knows the notebook
    error: BaseException | None  # None if it does not survive pickling
    secondary: bool  # an echo: some other rank failed first
    time: float  # time.monotonic() of this machine
    out_of_step: bool  # ranks have begun different collectives: their process group is of no more use


class Rank(ForkServerProcess):
    """One rank's process. `number` is its rank; the caller holds the other ends of `pipe` and `life`."""

    def __init__(self, number: int, setup: Setup, pipe: Connection, life: Connection) -> None:
        super().__init__(name=f"rank {number}")
        self.number, self.setup, self.pipe, self.life = number, setup, pipe, life

    def run(self) -> None:
        self.process = os.getpid()
        os.setpgid(0, 0)  # Ctrl-C is the caller's business; and one signal reaches whatever processes fn starts
        self.lock = threading.RLock()
        self.spare = spare()
        try:
            self.stacks = self.setup.stack_file(self.number).open("w")
        except FileNotFoundError:
            if self.life.poll(1.0):
                return  # the caller has ended before this rank began, by Ctrl-C, and has taken the folder away
            raise
        life.tie(self._listen)
        faulthandler.register(signal.SIGUSR1, file=self.stacks, all_threads=True)
        sys.stdout, sys.stderr = _Output(self, "stdout", 1), _Output(self, "stderr", 2)
        self._attempt(self._connect)
        while (call := self._receive()) is not None:
            self._attempt(call)
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__

    def send(self, kind: str, value: object) -> None:
        message = dumps((kind, value))
        with self.lock:
            self.pipe.send_bytes(message)

    def _connect(self) -> None:
        setup, device = self.setup, torch.device(self.setup.devices[self.number])
        os.environ.clear()
        os.environ.update(setup.environment)
        os.environ.update(RANK=str(self.number), LOCAL_RANK=str(self.number), REFIMPL_DEVICE=str(device))
        folder.hold(setup.directory)  # until this process ends
        keep_freed_memory()
        torch.set_num_threads(setup.threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            setup.backend,
            store=dist.FileStore(str(setup.directory / "rendezvous"), setup.ranks),  # type: ignore[attr-defined]
            rank=self.number,
            world_size=setup.ranks,
            timeout=_TIMEOUT[setup.backend],
            device_id=device if setup.backend == "nccl" else None,
        )
        self.first = Settings()

    def _receive(self) -> Callable[[], object] | None:
        """The caller's next wish; None to leave. Unpickling is part of the wish: if it fails, the caller is told."""
        message = self.pipe.recv_bytes()
        if not message:
            return None

        def call() -> object:
            if not self.setup.keep_settings:
                self.first.restore()
            fn, args = loads(message)
            return fn(*args)

        return call

    def _attempt(self, work: Callable[[], object]) -> None:
        """Do the work and send its result, or how it failed."""
        try:
            message = _result(work())
        except BaseException as error:
            if os.getpid() != self.process:
                raise  # of a child that `work` has forked: it ends with that, and speaks for no rank
            self.spare.close()  # it may have been the last memory that was missing
            message = dumps(("error", _failure(error)))
        sys.stdout.flush()
        sys.stderr.flush()
        with self.lock:
            self.pipe.send_bytes(message)
        if self.spare.closed:
            with suppress(OSError):
                self.spare = spare()

    def _listen(self) -> None:
        """What the caller asks, until it is gone."""
        try:
            # What torch keeps for a thread is made at its first call. A rank whose memory is full later, which the
            # answers are then to tell of, would be aborted by it; a thread begun then likewise.
            flight.oldest()
            while True:
                if self.life.recv_bytes() == STACKS:
                    faulthandler.dump_traceback(self.stacks, all_threads=True)
                else:
                    flight.write(self.setup.flight_file(self.number))
        finally:
            shutil.rmtree(self.setup.directory, ignore_errors=True)


def spare() -> mmap.mmap:
    """4 MB of address space, of which no page is used: given back, they let a rank without memory say so."""
    return mmap.mmap(-1, 1 << 22, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def report(obj: object) -> None:
    """In a rank: hand `obj` to the caller's `on_report(rank, obj)` at once. Elsewhere nothing happens.

    A report also tells the caller that this rank is alive: `timeout` starts anew.
    """
    process = multiprocessing.current_process()
    if isinstance(process, Rank):
        process.send("report", obj)


class _Output(io.TextIOBase):
    """A rank's stdout or stderr: sends whole lines to the caller, and the rest when flushed."""

    encoding = "utf-8"

    def __init__(self, rank: Rank, kind: str, descriptor: int) -> None:
        self.rank, self.kind, self.descriptor, self.text = rank, kind, descriptor, ""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.descriptor

    def write(self, text: str) -> int:
        with self.rank.lock:
            whole, newline, rest = (self.text + text).rpartition("\n")
            self.text = rest
            if newline:
                self.rank.send(self.kind, whole + newline)
        return len(text)

    def flush(self) -> None:
        with self.rank.lock:
            text, self.text = self.text, ""
            if text:
                self.rank.send(self.kind, text)


def _result(value: object) -> bytes:
    try:
        return dumps(("result", value))
    except Exception as error:
        raise TypeError(f"fn's result, a {type(value).__name__}, cannot be pickled for the caller: {error}") from None


def _failure(error: BaseException) -> Failure:
    now = time.monotonic()
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:  # ours; the reader's begin below
        frames = frames.tb_next
    trace = traceback.TracebackException(type(error), error, frames, lookup_lines=False)
    title = "".join(trace.format_exception_only()).strip()
    portable_trace = trace if survives(trace) else "".join(trace.format())
    portable_error, out_of_step = error if survives(error) else None, getattr(error, "out_of_step", False)
    return Failure(title, portable_trace, portable_error, is_echo(error), now, out_of_step)
