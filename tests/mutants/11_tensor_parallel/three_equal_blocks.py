"""There are as many heads of keys as of queries.

task: cut_qkv
says: the part of rank 0 has shape
"""

import torch


def cut_qkv(whole, heads, kv_heads, rank, ranks):
    if kv_heads % ranks:
        raise ValueError(f"{kv_heads} heads of keys and values cannot be dealt to {ranks} ranks equally")
    return torch.cat([block.chunk(ranks)[rank] for block in whole.chunk(3)])
