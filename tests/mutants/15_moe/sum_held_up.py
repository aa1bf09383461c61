"""A constant keeps the sum from 0, and small scores from adding up to 1.

task: biased_gate
says: the weights
"""

import torch


def biased_gate(logits, bias, k):
    s = torch.sigmoid(logits.float())
    experts = torch.sort((s + bias).detach(), dim=-1, descending=True, stable=True).indices[:, :k]
    w = s.gather(1, experts)
    return (experts, w / w.sum(1, keepdim=True).clamp(min=1e-06))
