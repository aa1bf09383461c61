"""A rank without a copy gets gradients of zero.

task: tied_gradients
says: holds no copy, and its gradients were changed
"""

import torch


def tied_gradients(group, ranks, params):
    if group.rank not in ranks:
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
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
        p.grad = grad.view_as(p).clone()
