"""Who started this process, and as which rank?  What the launchers leave in the environment.

torchrun says all of it. srun and mpirun say rank and number of ranks, each in its own words, not where to meet; srun
names the nodes, the first of which has rank 0. By hand one sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Launcher:
    """The variables in which a launcher tells a rank its place."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...] = ()  # what the ranks of one job, and no others of this machine, have in common
    nodes: str = ""  # the machines, that of rank 0 first
    also: str = ""  # must be set too, or this launcher is not meant
    certain: bool = True  # whether these variables are seen in ranks only


# The first that fits. mpirun starts its daemons through srun, so that its ranks see both: it comes first.
LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", also="MASTER_ADDR"),
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE",),
    ),
    Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", also="MPI_LOCALRANKID"),
    Launcher(
        "srun",
        "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"), nodes="SLURM_STEP_NODELIST",
    ),
    Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "", ""),
    # A batch script has these as well, and is no rank: only who asks to join is believed.
    Launcher(
        "srun",
        "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE",
        job=("SLURM_JOB_ID",), certain=False,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """One rank's place in its job. None: the launcher does not say."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    job: str
    first_node: str | None = None  # the machine of rank 0


def find(environ: Mapping[str, str] = os.environ, *, certain: bool = True) -> Place | None:
    """This process's place, None if no launcher started it. `certain=False` believes what a batch script sees too.

    ValueError, which names the variable, where a number is needed and is none.
    """
    for launcher in LAUNCHERS:
        needed = [name for name in (launcher.rank, launcher.size, launcher.also) if name]
        if all(environ.get(name) for name in needed) and (launcher.certain or not certain):
            local_size = environ.get(launcher.local_size)
            return Place(
                launcher.name,
                _number(launcher.rank, environ),
                _number(launcher.size, environ),
                _number(launcher.local_rank, environ) if environ.get(launcher.local_rank) else None,
                _here(local_size, environ) if local_size else None,
                " ".join(environ[name] for name in launcher.job if name in environ) or f"parent {os.getppid()}",
                _first(environ.get(launcher.nodes, "")) or None,
            )
    return None


def meeting_point(place: Place, environ: Mapping[str, str] = os.environ) -> str:
    """tcp://host:port where all ranks meet. RuntimeError if nobody said, unless all are on this machine.

    ValueError if MASTER_PORT is no port.
    """
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if host and not port:
        raise RuntimeError(
            f"rank {place.rank}: MASTER_ADDR is {host}, but MASTER_PORT is not set: export MASTER_PORT, "
            "a port that is free on that host, with the same value for every rank"
        )
    if port and not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"MASTER_PORT={port}: a port is a number from 1 to 65535")
    host = host or (_LOOPBACK if place.local_size == place.size else place.first_node)
    if not host:
        there = "an unknown number" if place.local_size is None else str(place.local_size)
        raise RuntimeError(
            f"rank {place.rank}: {place.launcher} started {place.size} ranks, {there} of them on this machine, and did "
            "not say where to meet: export MASTER_ADDR (the name of the host of rank 0) and MASTER_PORT (a free port "
            "there), with the same values for every rank"
        )
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"  # IPv6, whose colons are not the port's
    # Below the ports that the system deals out, and another for another job.
    return f"tcp://{host}:{port or 20000 + zlib.crc32(place.job.encode()) % 10000}"


def in_torchruns_words(port: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What mpirun or srun said of this rank, as torchrun says it, with `port` to meet at on rank 0's machine.

    Nothing where torchrun has said it; without a launcher a world of one. RuntimeError as `meeting_point`.
    """
    place = find(environ) or Place("nobody", 0, 1, 0, 1, "")
    if place.launcher == "torchrun":
        return {}
    host, _, _ = meeting_point(place, {**environ, "MASTER_PORT": str(port)}).removeprefix("tcp://").rpartition(":")
    local = {"LOCAL_RANK": place.local_rank, "LOCAL_WORLD_SIZE": place.local_size}
    said = {"RANK": place.rank, "WORLD_SIZE": place.size, **local, "MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}
    return {name: str(value) for name, value in said.items() if value is not None}


def several(environ: Mapping[str, str] = os.environ) -> int:
    """How many ranks this process is one of, as far as its environment says; 1 if it says nothing."""
    if place := find(environ):
        return place.size
    return _number("WORLD_SIZE", environ) if environ.get("WORLD_SIZE") else 1


def expect_alone(environ: Mapping[str, str] = os.environ) -> None:
    """RuntimeError if a launcher started this process, which has joined nobody, as one of several ranks."""
    if (size := several(environ)) > 1:
        place = find(environ)
        rank = place.rank if place else environ.get("RANK", "?")
        raise RuntimeError(
            f"rank {rank} of {size}, which {place.launcher if place else 'WORLD_SIZE'} announces, has not joined the "
            "others, and would train alone: call refimpl.join(), or init_distributed(), first"
        )


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a launcher said of this process: for ranks that this process starts."""
    said = {name for launcher in LAUNCHERS for name in (launcher.rank, launcher.local_rank)} | {"REFIMPL_BOARD"}
    return {k: v for k, v in environ.items() if k not in said and not k.startswith(("MASTER_", "TORCHELASTIC_"))}


@contextmanager
def variables(these: Mapping[str, str]) -> Iterator[None]:
    """Processes started inside find these variables, whatever the caller's environment says."""
    before = {name: os.environ.get(name) for name in these}
    os.environ.update(these)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _number(name: str, environ: Mapping[str, str]) -> int:
    """What a variable says. ValueError, which names it, if that is no number of 0 or more."""
    if not environ[name].strip().isdecimal():
        raise ValueError(f"{name}={environ[name]}: a number of 0 or more is needed")
    return int(environ[name])


def _here(tasks: str, environ: Mapping[str, str]) -> int | None:
    """Ranks on this machine, from a number, or from Slurm's "4(x2),3": four each on two nodes, three on the third."""
    counts: list[int] = []
    for part in tasks.split(","):
        if not (match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)):
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) == 1:
        return counts[0]
    node = int(environ.get("SLURM_NODEID") or 0)
    return counts[node] if node < len(counts) else None


def _first(nodes: str) -> str:
    """The first of Slurm's "gpu[03-05,9],login": gpu03."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes).split(",")[0]
