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

The same function runs under torchrun when the script calls `join()` first instead of `run`.
"""

import atexit
import gc
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from refimpl.ranks.errors import RankDied, RankError, RankTimeout
from refimpl.ranks.rank import report
from refimpl.ranks.world import OnReport, World, place

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
    "auto" (a GPU of its own and NCCL for each rank if there are enough, else cpu).
    threads: CPU threads a rank computes with. on_report(rank, obj) is called here for each `report(obj)` in a rank.
    What the ranks print appears on this process's stdout and stderr. No rank outlives the call.

    Raises RankError (see there), RankDied, RankTimeout; ValueError for ranks < 1; RuntimeError for "cuda" without GPU.
    """
    with World(ranks, device=device, threads=threads) as world:
        return world.call(fn, *args, timeout=timeout, on_report=on_report)


def under_torchrun() -> bool:
    """Whether a launcher such as torchrun started this process as one of its ranks (never true inside `run`)."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def join(device: str = "auto") -> None:
    """Join the ranks that torchrun started: make the process group its environment describes.

    NCCL with one GPU for each local rank when there are enough, else gloo on the CPU; or as `device` says, see `run`.
    The group is destroyed at exit.
    Raises RuntimeError if no launcher started this process.
    """
    if not under_torchrun():
        raise RuntimeError("join() needs the environment that torchrun sets: torchrun --nproc-per-node 2 script.py")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    backend, devices = place(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), device)
    mine = torch.device(devices[local_rank])
    os.environ["REFIMPL_DEVICE"] = str(mine)
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    dist.init_process_group(backend, device_id=mine if backend == "nccl" else None)
    atexit.register(_leave)


def _leave() -> None:
    failed = hasattr(sys, "last_value")  # then others may still wait in a collective, and destroying could too
    if dist.is_initialized() and not failed:
        gc.collect()  # transfers in reference cycles keep gloo's threads, with which Python can not exit
        dist.destroy_process_group()
