"""The summed gradient requires a gradient.

task: tied_gradients
says: requires a gradient itself
"""

import torch


def tied_gradients(group, ranks, params):
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
        p.grad = grad.view_as(p).clone().requires_grad_()
