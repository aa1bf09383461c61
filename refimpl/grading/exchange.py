"""What graders of functions that exchange tensors share: numbers that add exactly, what forward and backward sent."""

import torch
from torch import Tensor

from refimpl.grading.compare import a_tensor, require
from refimpl.grading.traffic import WatchedGroup, same_traffic

DTYPES = (torch.float32, torch.bfloat16)


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """-3 to 3: their sums and products are exact in any order, in bf16 too."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def of_ranks(group: WatchedGroup, *shape: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Every rank's own numbers, in rank order."""
    return [numbers(*shape, seed=100 * seed + rank, dtype=dtype) for rank in range(group.size)]


def total(parts: list[Tensor]) -> Tensor:
    """Their sum, in their dtype."""
    return torch.stack([p.float() for p in parts]).sum(0).to(parts[0].dtype)


def attached(x: object, what: str) -> Tensor:
    """Raise Wrong unless x is a tensor whose backward goes somewhere."""
    a_tensor(x, what)
    assert isinstance(x, Tensor)
    require(x.requires_grad, f"{what} has no gradient to pass on: is it detached, or a Function without apply?")
    return x


def silent(group: WatchedGroup, what: str, why: str) -> None:
    """Raise Wrong if this rank has sent anything."""
    require(not group.ledger.events, f"{what} sends something: {why}", *group.transcript()[:3])


def sends(group: WatchedGroup, what: str, x: Tensor, *ops: str) -> None:
    """Raise Wrong unless each collective of `ops` was called once, for the whole tensor x; then empty the ledger."""
    oracle, whole = group.oracle(), torch.zeros(x.numel(), dtype=x.dtype)
    part = torch.zeros(x.numel() // group.size, dtype=x.dtype)
    for op in ops:
        if op == "all_reduce":
            oracle.all_reduce(whole)
        elif op == "all_gather":
            oracle.all_gather(whole, part)
        else:
            oracle.reduce_scatter(part, whole)
    same_traffic(group, oracle, what, itemsize=x.dtype.itemsize)
    group.ledger.reset()
