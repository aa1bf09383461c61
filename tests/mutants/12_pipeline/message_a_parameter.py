"""A message for each parameter.

task: tied_gradients
says: messages, expected 1
"""

from collections.abc import Sequence

import torch
from torch import nn

from refimpl.comm.group import Group


def tied_gradients(group: Group, ranks: Sequence[int], params: Sequence[nn.Parameter]) -> None:
    if group.rank not in ranks:
        return
    for p in params:
        mine = (torch.zeros_like(p) if p.grad is None else p.grad).detach().contiguous()
        total = torch.zeros_like(mine)
        for rank in ranks:
            theirs = mine
            if rank != group.rank:
                theirs = torch.empty_like(mine)
                group.send_recv(mine, rank, theirs, rank)
            total += theirs
        p.grad = total.clone()
