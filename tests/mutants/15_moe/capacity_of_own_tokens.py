"""The capacity of this rank's tokens alone.

task: agreed_capacity
says: the ranks' capacities differ
"""

import math

import torch


def agreed_capacity(tokens, experts, k, factor, group):
    most = torch.tensor([tokens])
    return math.ceil(factor * k * int(most) / experts)
