"""The mask is made of the ranks' numbers.

task: ring_attention
says: the mask takes ranks for consecutive runs of tokens
"""

import math

import torch


def ring_attention(group, q, k, v, positions):
    out = (torch.zeros(q.shape, dtype=torch.float32), torch.full(q.shape[:-1], -math.inf))
    here = torch.stack([k, v])
    for hop in range(group.size):
        n = q.shape[1]
        mine = torch.arange(n) + group.rank * n
        theirs = torch.arange(n) + (group.rank - hop) % group.size * n
        seen = (theirs >= 0) & (theirs <= mine[:, None])
        scores = q.float() @ here[0].float().mT * q.shape[-1] ** (-0.5)
        lse = scores.masked_fill_(~seen, -math.inf).logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(~seen, 0)
        out = merge(out, (weights @ here[1].float(), lse))
        if hop < group.size - 1:
            arrived = torch.empty_like(here)
            group.send_recv(here, (group.rank + 1) % group.size, arrived, (group.rank - 1) % group.size)
            here = arrived
    return out[0].to(q.dtype)
