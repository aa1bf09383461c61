"""One buffer is sent to the right and filled from the left.

task: ring_attention
says: send_recv fills the memory that it sends
"""

import math

import torch


def ring_attention(group, q, k, v, positions):
    out = torch.zeros(q.shape, dtype=torch.float32), torch.full(q.shape[:-1], -math.inf)
    here = torch.stack([k, v])
    for hop in range(group.size):
        theirs = positions[(group.rank - hop) % group.size]
        seen = (theirs >= 0) & (theirs <= positions[group.rank][:, None])
        scores = q.float() @ here[0].float().mT * q.shape[-1] ** -0.5
        lse = scores.masked_fill_(~seen, -math.inf).logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(~seen, 0)
        out = merge(out, (weights @ here[1].float(), lse))
        if hop < group.size - 1:
            group.send_recv(here, (group.rank + 1) % group.size, here, (group.rank - 1) % group.size)
    return out[0].to(q.dtype)
