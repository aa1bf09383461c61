"""Query heads are dealt out in turn, away from the keys that they read.

task: cut_qkv
says: query heads are dealt out in turn
"""

import torch


def cut_qkv(whole, heads, kv_heads, rank, ranks):
    if kv_heads % ranks:
        raise ValueError(f"{kv_heads} heads of keys and values cannot be dealt to {ranks} ranks equally")
    d = whole.shape[0] // (heads + 2 * kv_heads)
    blocks = whole.detach().split([heads * d, kv_heads * d, kv_heads * d])
    q, k, v = blocks
    q = q.unflatten(0, (heads, d))[rank::ranks].flatten(0, 1)
    return torch.cat([q, k.chunk(ranks)[rank], v.chunk(ranks)[rank]])
