"""Where one set shows nothing, the result is nothing.

task: merge
says: still sees the other
"""

import torch


def merge(one, other):
    lse = torch.logaddexp(one[1], other[1])
    out = torch.zeros_like(one[0])
    for part, log_sum in (one, other):
        share = (log_sum - lse).exp().masked_fill(log_sum.isneginf(), 0)
        out += share.unsqueeze(-1) * part
    return (out.masked_fill((one[1].isneginf() | other[1].isneginf()).unsqueeze(-1), 0), lse)
