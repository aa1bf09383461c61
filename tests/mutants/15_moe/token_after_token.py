"""Routes find their places token after token.

task: positions
says: all first choices come before any second one
"""

import torch


def positions(experts, number, capacity):
    flat = experts.flatten()
    here = flat.unsqueeze(1) == torch.arange(number, device=flat.device)
    before = here.cumsum(0).sub_(1).masked_fill_(~here, 0).sum(1)
    places = before.masked_fill((flat < 0) | (before >= capacity), -1)
    return places.view(experts.shape)
