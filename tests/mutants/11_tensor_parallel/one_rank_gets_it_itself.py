"""One rank gets the matrix itself.

task: cut_qkv
says: the part is `whole` itself
"""

import torch


def cut_qkv(whole, heads, kv_heads, rank, ranks):
    if kv_heads % ranks:
        raise ValueError(f"{kv_heads} heads of keys and values cannot be dealt to {ranks} ranks equally")
    d = whole.shape[0] // (heads + 2 * kv_heads)
    blocks = whole.detach().split([heads * d, kv_heads * d, kv_heads * d])
    return torch.cat([block.chunk(ranks)[rank] for block in blocks]) if ranks > 1 else whole
