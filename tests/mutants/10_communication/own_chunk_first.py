"""Each rank begins the sum with its own chunk.

task: quantized_reduce_scatter
says: added in fp32, in rank order
"""

import torch


def quantize_blocks(x, block):
    n = x.numel()
    blocks = -(-n // block)
    padded = torch.zeros(blocks * block)
    padded[:n] = x
    rows = padded.view(blocks, block)
    scales = rows.abs().amax(1) / 127
    q = (rows / torch.where(scales == 0, 1.0, scales)[:, None]).round().to(torch.int8)
    return (q.view(-1)[:n].clone(), scales)


def quantized_reduce_scatter(x, block, group):
    N = group.size
    s = x.numel() // N
    pairs = [quantize_blocks(c, block) for c in x.view(N, s)]
    q, sc = (torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs]))
    q2, s2 = (torch.empty_like(q), torch.empty_like(sc))
    group.all_to_all(q2, q)
    group.all_to_all(s2, sc)
    out = torch.zeros(s)
    for r in sorted(range(N), key=lambda r: r != group.rank):
        out += q2.view(N, s)[r].float() * s2.view(N, -1)[r].repeat_interleave(block)[:s]
    return out
