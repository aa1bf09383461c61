"""torch.ceil, in fp32: above 2^24 tokens are missing.

task: agreed_capacity
says: the capacity is wrong
"""

import torch


def agreed_capacity(tokens, experts, k, factor, group):
    most = torch.tensor([tokens])
    group.all_reduce(most, op="max")
    return int(torch.ceil(torch.tensor(factor * k * int(most) / experts)))
