"""The first rank's weights for all ranks of a group, wherever a model lies that is still to be moved.

NCCL has no way for tensors on the CPU: each goes over the group's device, one at a time, and back.
"""

from collections.abc import Iterable

from torch import Tensor

from refimpl.comm.group import Group


def take_first(tensors: Iterable[Tensor], group: Group, tag: str) -> None:
    """Every rank calls it with as many."""
    for tensor in tensors:
        there = tensor.data.to(group.device)
        group.broadcast(there, tag=tag)
        if there.device != tensor.device:
            tensor.data.copy_(there)
