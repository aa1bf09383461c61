"""The fused matrix is cut in N runs of rows.

task: cut_qkv
says: rank 0 then has queries only
"""


def cut_qkv(whole, heads, kv_heads, rank, ranks):
    if kv_heads % ranks:
        raise ValueError(f"{kv_heads} heads of keys and values cannot be dealt to {ranks} ranks equally")
    return whole.chunk(ranks)[rank].clone()
