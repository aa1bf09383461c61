"""A number of heads that N does not divide goes through.

task: cut_qkv
says: are accepted: expected a ValueError
"""

import torch


def cut_qkv(whole, heads, kv_heads, rank, ranks):
    d = whole.shape[0] // (heads + 2 * kv_heads)
    blocks = whole.detach().split([heads * d, kv_heads * d, kv_heads * d])
    return torch.cat([block.chunk(ranks)[rank] for block in blocks])
