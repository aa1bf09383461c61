"""Scores of all keys are kept until the end.

task: ring_attention
says: no rank may hold the scores, or the keys, of the whole sequence at once
"""

import math

import torch


def ring_attention(group, q, k, v, positions):
    here, scores, values = torch.stack([k, v]), [], []
    for hop in range(group.size):
        theirs = positions[(group.rank - hop) % group.size]
        seen = (theirs >= 0) & (theirs <= positions[group.rank][:, None])
        scores.append((q.float() @ here[0].float().mT * q.shape[-1] ** -0.5).masked_fill(~seen, -math.inf))
        values.append(here[1].float())
        if hop < group.size - 1:
            arrived = torch.empty_like(here)
            group.send_recv(here, (group.rank + 1) % group.size, arrived, (group.rank - 1) % group.size)
            here = arrived
    return (torch.cat(scores, -1).softmax(-1).nan_to_num(0) @ torch.cat(values, 1)).to(q.dtype)
