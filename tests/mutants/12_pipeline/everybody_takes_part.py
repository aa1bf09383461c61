"""An all-reduce over the whole group, to which the others bring nothing.

task: tied_gradients
says: all_reduce is used: it needs all ranks of the group
"""

from collections.abc import Sequence

import torch
from torch import nn

from refimpl.comm.group import Group


def tied_gradients(group: Group, ranks: Sequence[int], params: Sequence[nn.Parameter]) -> None:
    for p in params:
        total = torch.zeros_like(p)
        if group.rank in ranks and p.grad is not None:
            total.copy_(p.grad)
        total = total.detach().contiguous()
        group.all_reduce(total)
        if group.rank in ranks:
            p.grad = total
