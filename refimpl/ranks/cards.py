"""Which card each rank has: NCCL takes one rank a card, whatever its slices (MIG), and says "Duplicate GPU" of two."""

import os
import socket
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from refimpl.ranks.environment import Place
from refimpl.ranks.here import host


def has_own_gpu(place: Place, store: Store, local_size: int) -> bool:
    """Whether each rank of a machine sees one GPU, another each, as `srun --gpus-per-task=1` has it: its "cuda:0"."""
    sees_one = local_size > 1 and torch.cuda.device_count() == 1
    store.set(f"refimpl/gpu/{place.rank}", card(0) if sees_one else "")
    seen = [store.get(f"refimpl/gpu/{rank}") for rank in range(place.size)] if sees_one else [b""]
    return all(seen) and len(set(seen)) == len(seen)


def refuse_shared(place: Place, store: Store, backend: str, device: torch.device) -> None:
    """RuntimeError on every rank if two speak NCCL from one card, or one speaks NCCL and another does not.

    As where two agents of torchrun on one machine deal out all of its GPUs each, or where one machine has none. A newer
    NCCL takes ranks that share a card, where the environment says so.
    """
    mine = f"{card(device.index or 0)} of {socket.gethostname()}" if "nccl" in backend else ""
    store.set(f"refimpl/card/{place.rank}", mine)
    seen = store.multi_get([f"refimpl/card/{rank}" for rank in range(place.size)])
    ranks_of: dict[str, list[int]] = {}
    for rank, published in enumerate(seen):
        ranks_of.setdefault(published.decode(), []).append(rank)
    without = ranks_of.pop("", [])
    shared = {where: ranks for where, ranks in ranks_of.items() if len(ranks) > 1}
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        shared = {}
    if not (shared or (ranks_of and without)):
        return
    store.set(f"refimpl/card/{place.rank}/told", "")
    if place.rank == 0:  # it may hold the store, which ends with it
        store.wait([f"refimpl/card/{rank}/told" for rank in range(place.size)])
    if without:
        raise RuntimeError(
            f"ranks {without} have not a GPU each on their machine, and the others speak NCCL: start as many ranks as "
            "GPUs on every machine, or say device='cpu' on all"
        )
    told = "; ".join(f"ranks {ranks} have one GPU, {where.split(' ', 1)[1]}" for where, ranks in shared.items())
    raise RuntimeError(
        f'{told}: NCCL needs one for each ("Duplicate GPU detected"). Start one torchrun a machine, or give each GPUs '
        "of its own by CUDA_VISIBLE_DEVICES; with backend='gloo' and device='cuda' ranks share one, slowly"
    )


def card(index: int) -> str:
    """Where the card is that this process sees, or sees a slice of. A slice has a uuid of its own, and this place."""
    gpu: Any = torch.cuda.get_device_properties(index)
    return f"{host()} {gpu.pci_domain_id}:{gpu.pci_bus_id}:{gpu.pci_device_id}"
