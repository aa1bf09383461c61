"""Padding is marked in the tensor that was given.

task: positions
says: experts was changed
"""

import torch


def positions(experts, number, capacity):
    experts[experts < 0] = number
    flat = experts.t().flatten()
    here = flat.unsqueeze(1) == torch.arange(number, device=flat.device)
    before = here.cumsum(0).sub_(1).masked_fill_(~here, 0).sum(1)
    places = before.masked_fill((flat == number) | (before >= capacity), -1)
    return places.view(experts.shape[::-1]).t()
