"""Which card each rank has: NCCL takes one rank a card, whatever its slices (MIG), and says "Duplicate GPU" of two."""

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

    As where two agents of torchrun on one machine deal out all of its GPUs each, or where one machine has none.
    """
    store.set(f"refimpl/card/{place.rank}", card(device.index or 0) if "nccl" in backend else "")
    seen = store.multi_get([f"refimpl/card/{rank}" for rank in range(place.size)])
    ranks_of: dict[str, list[int]] = {}
    for rank, published in enumerate(seen):
        ranks_of.setdefault(published.decode(), []).append(rank)
    without = ranks_of.pop("", [])
    if ranks_of and without:
        raise RuntimeError(
            f"ranks {without} have not a GPU each on their machine, and the others speak NCCL: start as many ranks as "
            "GPUs on every machine, or say device='cpu' on all"
        )
    for where, ranks in ranks_of.items():
        if len(ranks) > 1:
            machine, bus = where.rsplit(" ", 1)
            raise RuntimeError(
                f'ranks {ranks} have one GPU, {bus} of {machine}, which NCCL refuses ("Duplicate GPU detected"): start '
                "one torchrun a machine, or give each GPUs of its own by CUDA_VISIBLE_DEVICES; with backend='gloo' "
                "they share it, slowly"
            )


def card(index: int) -> str:
    """Where the card is that this process sees, or sees a slice of. A slice has a uuid of its own, and this place."""
    gpu: Any = torch.cuda.get_device_properties(index)
    return f"{host()} {gpu.pci_domain_id}:{gpu.pci_bus_id}:{gpu.pci_device_id}"
