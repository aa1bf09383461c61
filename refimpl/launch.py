"""`run(fn, ranks=N)` calls fn on N real processes that form a torch.distributed world, and returns their N results.

The processes are forked from a server that has torch imported already, so a fresh world takes a fraction of a second
and no state is left from the world before. Works alike in a script, a test and a notebook cell: functions travel by
value, output comes back, and what goes wrong on a rank is raised here, with the rank and the line in its text.

    from refimpl import launch

    def add(x):
        t = torch.tensor([x + dist.get_rank()])
        dist.all_reduce(t)
        return t.item()

    launch.run(add, 10, ranks=2)   # [21, 21]

The same function runs under torchrun, srun or mpirun when the script calls `join()` first instead of `run`.
"""

import atexit
import datetime
import gc
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from refimpl.ranks import environment
from refimpl.ranks.errors import RankDied, RankError, RankTimeout
from refimpl.ranks.meet import BOTH, meet
from refimpl.ranks.rank import report
from refimpl.ranks.world import OnReport, World

__all__ = ["RankDied", "RankError", "RankTimeout", "World", "join", "report", "run", "under_torchrun"]

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    *args: Any,
    ranks: int = 2,
    timeout: float | None = 60,
    device: str = "auto",
    threads: int = 1,
    on_report: OnReport | None = None,
) -> list[T]:
    """Call fn(*args) on `ranks` new processes of this machine; their results in rank order.

    timeout: seconds without a result or a report from any rank until all are stopped; None: wait for ever.
    device: "cpu" (gloo); "cuda" (NCCL if each rank has a GPU of its own, else they share the GPUs and speak gloo);
    "auto" (a GPU of its own and NCCL for each rank if there are enough, else cpu, and cpu where REFIMPL_DEVICE=cpu).
    threads: CPU threads a rank computes with. on_report(rank, obj) is called here for each `report(obj)` in a rank.
    What the ranks print appears on this process's stdout and stderr. No rank outlives the call.

    Raises RankError (see there), RankDied, RankTimeout (within seconds, too, when ranks wait in a collective for one
    that has returned); ValueError for ranks < 1 or another device; TypeError for what cannot be
    pickled, in fn or args; RuntimeError for "cuda" without GPU.
    """
    with World(ranks, device=device, threads=threads) as world:
        return world.call(fn, *args, timeout=timeout, on_report=on_report)


def under_torchrun() -> bool:
    """Whether torchrun, srun or mpirun started this process as one of its ranks (never true inside `run`)."""
    return environment.find() is not None


def join(
    device: str = "auto",
    *,
    timeout: float | datetime.timedelta | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
) -> None:
    """Join the ranks that torchrun, srun or mpirun started: make the process group that all of them form.

    NCCL with one GPU for each local rank when there are enough, else gloo on the CPU; or as `device` says, see `run`.
    timeout: seconds a collective may take; None: torch's default. init_method: where to meet, such as
    "tcp://host:29500"; else MASTER_ADDR and MASTER_PORT say it, or nobody need if all ranks are on this machine. rank,
    world_size: this process's place, if no launcher says it. backend: "nccl", "gloo" or "cpu:gloo,cuda:nccl"; nccl
    without a GPU for each rank becomes gloo, with a warning where it is asked for alone. RANK, WORLD_SIZE, LOCAL_RANK
    and LOCAL_WORLD_SIZE are set afterwards. The group is destroyed at exit. Nothing happens where the ranks are joined
    already, as inside `run`.

    Raises RuntimeError if no launcher started this process, if nobody says where to meet, for "cuda" without GPU, and
    where two ranks would speak NCCL on one card; ValueError for another backend or device, for half a place, and for a
    rank that is not below world_size.
    """
    backend = backend and ",".join(sorted(backend.split(",")))
    if backend not in (None, "nccl", "gloo", BOTH):
        raise ValueError(f"backend must be 'nccl' or 'gloo', not {backend!r}; or both, as {BOTH!r}")
    if not dist.is_initialized():
        place = _place(rank, world_size)
        meeting = init_method if init_method not in (None, "env://") else environment.meeting_point(place)
        limit = datetime.timedelta(seconds=timeout) if isinstance(timeout, float | int) else timeout
        meet(place, meeting, device, backend, limit)
        atexit.register(_leave)


def _place(rank: int | None, world_size: int | None) -> environment.Place:
    """This process's place in its job: what it was told, else what the launcher says."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together: got rank={rank}, world_size={world_size}")
    place = environment.find(certain=False)
    known = (place.rank, place.size) if place else None
    if rank is not None and world_size is not None and known != (rank, world_size):
        place = environment.Place("you", rank, world_size, None, None, "")
    if place is None:
        raise RuntimeError(
            "join() needs the environment that torchrun sets: torchrun --nproc-per-node 2 script.py; or srun, or "
            "mpirun; by hand: export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    if not 0 <= place.rank < place.size:
        raise ValueError(f"rank must be from 0 to {place.size - 1}, for {place.size} ranks, not {place.rank}")
    return place


def _leave() -> None:
    failed = hasattr(sys, "last_value")  # then others may still wait in a collective, and destroying could too
    if dist.is_initialized() and not failed:
        gc.collect()  # transfers in reference cycles keep gloo's threads, with which Python can not exit
        dist.destroy_process_group()
    elif dist.is_initialized() and "nccl" in dist.get_backend():
        distributed_c10d._abort_process_group()  # what others will not enter must not keep this process on the GPU
