"""Ranks that somebody else started meet: which of them share this machine, on which devices, by which library."""

import datetime
import os
import socket
import warnings

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from refimpl.ranks.allocator import keep_freed_memory
from refimpl.ranks.attempt import of_this_attempt
from refimpl.ranks.cards import has_own_gpu, refuse_shared
from refimpl.ranks.environment import Place

BOTH = "cpu:gloo,cuda:nccl"  # one group, and for each device's tensors a library


def meet(place: Place, meeting: str, device: str, backend: str | None, timeout: datetime.timedelta | None) -> None:
    """Make torch's default process group of all ranks, this one at `place`, and set what torchrun sets."""
    keep_freed_memory()
    device = wished(device)
    limit = timeout or default_pg_timeout
    store, _, _ = next(rendezvous(meeting, place.rank, place.size, timeout=limit))
    store.set_timeout(limit)
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        store = of_this_attempt(store, place.rank, place.size, limit)
    local_rank, local_size = _on_this_machine(place, store)
    chosen, devices = devices_of(local_size, device)
    if device != "cpu" and has_own_gpu(place, store, local_size):
        chosen, devices = "nccl", ["cuda:0"] * local_size
    elif place.rank == 0:
        tell_if_too_few(local_size, device)
    if backend == "nccl" and chosen != "nccl" and place.rank == 0:
        warnings.warn(
            f"backend='nccl' needs a GPU for each of the {local_size} ranks of a machine, and torch finds "
            f"{torch.cuda.device_count()} here: the ranks speak gloo",
            stacklevel=3,
        )
    if backend == "gloo" or (backend == BOTH and chosen == "nccl"):
        chosen = backend
    mine = torch.device(devices[local_rank])
    refuse_shared(place, store, chosen, mine)
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.size), REFIMPL_DEVICE=str(mine))
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_size))
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    dist.init_process_group(
        chosen,
        store=PrefixStore("refimpl", store),
        rank=place.rank,
        world_size=place.size,
        timeout=timeout,
        device_id=mine if chosen == "nccl" else None,
    )


def _on_this_machine(place: Place, store: Store) -> tuple[int, int]:
    """(local rank, number of local ranks): what the launcher says, else who else has this host's name.

    ValueError for a local rank that so many ranks do not have.
    """
    if place.local_rank is not None and place.local_size is not None:
        if place.local_rank >= place.local_size:
            raise ValueError(
                f"rank {place.rank}: {place.launcher} says that this is local rank {place.local_rank} of "
                f"{place.local_size} on this machine, and they are numbered from 0: where LOCAL_RANK and "
                "LOCAL_WORLD_SIZE are set by hand, set both for every rank, or neither"
            )
        return place.local_rank, place.local_size
    mine = socket.gethostname()
    store.set(f"refimpl/host/{place.rank}", mine)
    here = [rank for rank in range(place.size) if store.get(f"refimpl/host/{rank}").decode() == mine]
    return here.index(place.rank), len(here)


def wished(device: str) -> str:
    """ "auto" is the CPU where the environment has said so: REFIMPL_DEVICE=cpu."""
    return "cpu" if device == "auto" and os.environ.get("REFIMPL_DEVICE") == "cpu" else device


def tell_if_too_few(ranks: int, device: str) -> None:
    """Warn where "auto" leaves GPUs alone as ranks are more: NCCL refuses two on one ("Duplicate GPU detected")."""
    gpus = torch.cuda.device_count() if wished(device) == "auto" else 0
    if 0 < gpus < ranks:
        warnings.warn(
            f"torch finds {gpus} GPU{'s' * (gpus > 1)} for {ranks} ranks of this machine, so all compute on the CPU: "
            "start as many ranks as GPUs, or let ranks share them (slowly, by gloo) with device='cuda'; where the CPU "
            "is meant, REFIMPL_DEVICE=cpu says so",
            stacklevel=4,
        )


def devices_of(ranks: int, device: str) -> tuple[str, list[str]]:
    """The backend, and the device of each of the ranks on this machine."""
    device = wished(device)
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', not {device!r}")
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise RuntimeError("device='cuda', but torch finds no GPU on this machine: use 'cpu' or 'auto'")
    if device == "cpu" or (device == "auto" and gpus < ranks):
        return "gloo", ["cpu"] * ranks
    return "nccl" if gpus >= ranks else "gloo", [f"cuda:{rank % gpus}" for rank in range(ranks)]
