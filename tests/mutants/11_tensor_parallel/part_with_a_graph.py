"""The part holds the graph of the whole.

task: cut_qkv
says: the part holds the graph of `whole`
"""

import torch


def cut_qkv(whole, heads, kv_heads, rank, ranks):
    if kv_heads % ranks:
        raise ValueError(f"{kv_heads} heads of keys and values cannot be dealt to {ranks} ranks equally")
    d = whole.shape[0] // (heads + 2 * kv_heads)
    blocks = whole.split([heads * d, kv_heads * d, kv_heads * d])
    return torch.cat([block.chunk(ranks)[rank] for block in blocks])
