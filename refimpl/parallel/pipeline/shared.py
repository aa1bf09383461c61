"""Gradients of parameters that several ranks hold: each rank gets the sum of all, added in the order of the ranks.

For the two copies that a stage has in DualPipe, and for weights that stages share (an embedding and the head tied to
it). Once a step, after the last micro-batch. Traffic: a rank sends n (k - 1) bytes to its k - 1 partners; k is 2 but
for weights tied over more stages.

The sum is the gradient of one process up to the order of additions: there a tied weight's micro-batches are added one
by one, (a0 + b0) + (a1 + b1), here by stage, (a0 + a1) + (b0 + b1). On every rank it is the same bits.
DeepSpeed: deepspeed/runtime/pipe/module.py, allreduce_tied_weight_gradients.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.comm.streams import told


def sum_gradients(group: Group, partners: Sequence[int], params: Sequence[nn.Parameter]) -> None:
    """`.grad` of each parameter: its sum over the partners, of which this rank is one. None only if it is on all.

    partners: ranks of `group`, the same list on each. params: in the same order on each, of the same shapes and dtypes.
    ValueError if this rank is no partner. To be called by the partners alone, in one order where there are several.
    """
    if group.rank not in partners:
        raise ValueError(f"rank {group.rank} is none of the ranks {list(partners)} that share these gradients")
    for dtype in dict.fromkeys(p.dtype for p in params):
        alike = [p for p in params if p.dtype == dtype]
        has = told([p.grad is not None for p in alike], dtype, group.device)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in alike]
        mine = torch.cat([has, *(grad.reshape(-1) for grad in grads)])
        total = reduce(torch.add, [mine if rank == group.rank else _swap(group, mine, rank) for rank in partners])
        flags, *sums = torch.split(total, [len(alike), *(p.numel() for p in alike)])
        for p, any_, summed in zip(alike, flags.tolist(), sums, strict=True):
            p.grad = summed.view_as(p).clone() if any_ else None


def _swap(group: Group, mine: Tensor, other: int) -> Tensor:
    """What the other rank has, which gets mine."""
    theirs = torch.empty_like(mine)
    group.send_recv(mine, other, theirs, other, tag="pipeline shared gradients")
    return theirs


@torch.no_grad()
def copy_weights(group: Group, partners: Sequence[int], params: Sequence[nn.Parameter]) -> None:
    """Each parameter becomes that of the first partner. To be called by the partners alone, as `sum_gradients`.

    Over the group's device, wherever the modules lie that are still to be moved: as `first.py`.
    """
    for p in params:
        there = p.detach().to(group.device).contiguous()
        if group.rank == partners[0]:
            for other in partners[1:]:
                group.send(there, other, tag="pipeline shared weights")
        else:
            group.recv(there, partners[0], tag="pipeline shared weights")
            p.copy_(there)
