"""What a call can be seen to be wrong about before it begins: a ValueError names the call, the value and the remedy."""

from collections.abc import Collection

import torch
from torch import Tensor

from refimpl.comm.collectives import NATIVE

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # which torch moves, and cannot add


def tensors(call: str, served: Collection[str] = (), **given: Tensor | list[Tensor]) -> None:
    """Each must be contiguous, as it travels as one piece of memory; all of one dtype, as nothing is converted.

    served: the types of device that the group has a library for, if there are others.
    """
    first = dtype = None
    for name, value in given.items():
        for tensor in value if isinstance(value, list) else (value,):
            if served and tensor.device.type not in served:
                raise elsewhere(call, name, tensor, served)
            if tensor.layout is not torch.strided:
                raise ValueError(f"{call}: {name} is {tensor.layout}, not one piece of memory: pass {name}.to_dense()")
            if not tensor.is_contiguous():
                shape = tuple(tensor.shape)
                raise ValueError(f"{call}: {name} {shape} is not contiguous in memory: pass {name}.contiguous()")
            if dtype is None:
                first, dtype = name, tensor.dtype
            elif tensor.dtype != dtype:
                raise ValueError(f"{call}: {first} is {dtype}, {name} is {tensor.dtype}: they must have one dtype")


def elsewhere(call: str, name: str, tensor: Tensor, served: Collection[str]) -> ValueError:
    """What is wrong with a tensor on a device for which the group has no library, as on the CPU where it is NCCL."""
    there = " or ".join(sorted(served))
    return ValueError(
        f"{call}: {name} is on {tensor.device}, and the group has a library for tensors on {there} alone: pass "
        f'{name}.to("{min(served)}"), or a group that has one for both, as init_process_group("cpu:gloo,cuda:nccl") '
        'makes it or, for the CPU, new_group(backend="gloo")'
    )


def reduction(call: str, op: str, x: Tensor, out: Tensor, served: Collection[str] = ()) -> None:
    """x and out must be contiguous, and the reduction must exist for x's dtype; out's may be wider."""
    tensors(call, served, x=x)
    if out is not x:
        tensors(call, served, out=out)
    if op not in NATIVE:
        raise ValueError(f"{call}: op must be one of {', '.join(NATIVE)}, not {op!r}")
    if x.dtype in UNSIGNED or (x.is_floating_point() and x.element_size() == 1):
        raise ValueError(f"{call}: torch cannot add {x.dtype}: reduce x.float(), or send x as it is by an all_gather")
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise ValueError(f"{call}: the mean of {x.dtype} is no {x.dtype}: sum it, or pass x.float()")
    if op == "max" and x.is_complex():
        raise ValueError(f"{call}: {x.dtype} has no greatest: take the maximum of x.abs()")
    if out.is_floating_point() != x.is_floating_point():
        raise ValueError(f"{call}: x is {x.dtype}, out is {out.dtype}: they must have one dtype")


def splits(call: str, rank: int, size: int, **given: tuple[Tensor, list[int] | None]) -> int:
    """Each tensor's rows must be dealt out to the group's ranks, as the splits say or equally, and its own part fit.

    Returns the elements of that part.
    """
    own = {}
    for name, (tensor, parts) in given.items():
        rows = tensor.shape[0] if tensor.dim() else 1
        if parts is None and rows % size:
            raise ValueError(f"{call}: {name} has {rows} rows, which {size} ranks cannot share equally: give splits")
        if parts is not None and (len(parts) != size or sum(parts) != rows or min(parts) < 0):
            raise ValueError(f"{call}: {name} has {rows} rows for {size} ranks, and the splits are {parts}")
        own[name] = (parts[rank] if parts else rows // size) * (tensor.numel() // max(1, rows))
    if len({*own.values()}) > 1:
        raise ValueError(f"{call}: what rank {rank} sends itself must fit what it gets from itself: elements {own}")
    return next(iter(own.values()))


def parts(call: str, rank: int, size: int, whole: Tensor, part: Tensor) -> None:
    """The whole must be as long as the ranks' parts together."""
    if whole.numel() != part.numel() * size:
        raise ValueError(f"{call} on rank {rank}: {whole.numel()} elements are not {size} ranks x {part.numel()}")


def member(call: str, name: str, rank: int, size: int) -> None:
    """A rank of the group."""
    if not 0 <= rank < size:
        raise ValueError(f"{call}: {name}={rank}, but this group has {size} ranks: 0 to {size - 1}")


def other(call: str, name: str, rank: int, size: int, mine: int) -> None:
    """A rank of the group other than this one."""
    member(call, name, rank, size)
    if rank == mine:
        raise ValueError(f"{call}: {name}={rank} is this rank itself: copy the tensor instead")
