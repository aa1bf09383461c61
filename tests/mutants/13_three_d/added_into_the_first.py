"""The sum is made in the first part.

task: merge
says: out_1 was changed
"""

import torch


def merge(one, other):
    lse = torch.logaddexp(one[1], other[1])
    out = one[0].mul_((one[1] - lse).exp().masked_fill(one[1].isneginf(), 0).unsqueeze(-1))
    for part, log_sum in (other,):
        share = (log_sum - lse).exp().masked_fill(log_sum.isneginf(), 0)
        out += share.unsqueeze(-1) * part
    return (out, lse)
