"""A token that goes nowhere counts for expert 0.

task: positions
says: places of padding are counted
"""

import torch


def positions(experts, number, capacity):
    flat = experts.t().flatten().clamp(min=0)
    here = flat.unsqueeze(1) == torch.arange(number, device=flat.device)
    before = here.cumsum(0).sub_(1).masked_fill_(~here, 0).sum(1)
    places = before.masked_fill((experts.t().flatten() < 0) | (before >= capacity), -1)
    return places.view(experts.shape[::-1]).t()
