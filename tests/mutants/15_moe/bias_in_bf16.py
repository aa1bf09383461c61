"""The bias is rounded to the logits' dtype.

task: biased_gate
says: the bias is rounded to 16 bits
"""

import torch


def _chosen(scores, k):
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]


def biased_gate(logits, bias, k):
    scores = logits.float().sigmoid()
    experts = _chosen(scores.detach() + bias.detach().to(logits.dtype), k)
    picked = scores.gather(1, experts)
    return experts, picked / picked.sum(1, keepdim=True)
