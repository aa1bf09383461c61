"""Each rank begins with its own part.

task: tied_gradients
says: has other bits on each rank
"""

from collections.abc import Sequence

import torch
from torch import nn

from refimpl.comm.group import Group


def tied_gradients(group: Group, ranks: Sequence[int], params: Sequence[nn.Parameter]) -> None:
    if group.rank not in ranks:
        return
    mine = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in params])
    total = mine.clone()
    for rank in [rank for rank in ranks if rank != group.rank]:
        theirs = mine
        if rank != group.rank:
            theirs = torch.empty_like(mine)
            group.send_recv(mine, rank, theirs, rank)
        total += theirs
    for p, grad in zip(params, total.split([p.numel() for p in params]), strict=True):
        p.grad = grad.view_as(p).clone()
