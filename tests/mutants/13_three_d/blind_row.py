"""A query that sees none of the keys at hand.

task: ring_attention
says: a query that sees none of the keys at hand
"""

import math

import torch


def ring_attention(group, q, k, v, positions):
    out = (torch.zeros(q.shape, dtype=torch.float32), torch.full(q.shape[:-1], -math.inf))
    here = torch.stack([k, v])
    for hop in range(group.size):
        theirs = positions[(group.rank - hop) % group.size]
        seen = (theirs >= 0) & (theirs <= positions[group.rank][:, None])
        scores = q.float() @ here[0].float().mT * q.shape[-1] ** (-0.5)
        lse = scores.masked_fill_(~seen, -math.inf).logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        out = merge(out, (weights @ here[1].float(), lse))
        if hop < group.size - 1:
            arrived = torch.empty_like(here)
            group.send_recv(here, (group.rank + 1) % group.size, arrived, (group.rank - 1) % group.size)
            here = arrived
    return out[0].to(q.dtype)
