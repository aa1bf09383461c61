"""The first rank's values for all ranks of a group, however a tensor lies in memory, and wherever it does.

NCCL has no way for tensors on the CPU: each goes over the group's device, one at a time, and back.
"""

from collections.abc import Iterable

from torch import Tensor

from refimpl.comm.group import Group


def take_first(tensors: Iterable[Tensor], group: Group, tag: str) -> None:
    """Every rank calls it with as many. What is expanded gets memory of its own."""
    for tensor in tensors:
        if is_expanded(tensor):
            tensor.data = tensor.data.contiguous()
        there = tensor.data.to(group.device).contiguous()
        group.broadcast(there, tag=tag)
        if there.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(there)


def is_expanded(tensor: Tensor) -> bool:
    """Whether elements of it share memory, so that nothing can be copied into it."""
    return any(step == 0 < length - 1 for length, step in zip(tensor.shape, tensor.stride(), strict=True))
