"""The running softmax rescales its sum and forgets its outputs.

task: ring_attention
says: was not scaled down with their sum
"""

import math

import torch


def ring_attention(group, q, k, v, positions):
    out = torch.zeros(q.shape, dtype=torch.float32)
    den = torch.zeros(q.shape[:-1])
    top = torch.full(q.shape[:-1], -math.inf)
    here = torch.stack([k, v])
    for hop in range(group.size):
        theirs = positions[(group.rank - hop) % group.size]
        seen = (theirs >= 0) & (theirs <= positions[group.rank][:, None])
        s = (q.float() @ here[0].float().mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
        new = torch.maximum(top, s.amax(-1))
        p = (s - new.unsqueeze(-1)).exp().nan_to_num(0)
        out = out + p @ here[1].float()
        den = den * (top - new).exp().nan_to_num(0) + p.sum(-1)
        top = new
        if hop < group.size - 1:
            got = torch.empty_like(here)
            group.send_recv(here, (group.rank + 1) % group.size, got, (group.rank - 1) % group.size)
            here = got
    return (out / den.clamp(min=1e-30).unsqueeze(-1)).to(q.dtype)
