"""What travels is fp32 again.

task: quantized_reduce_scatter
says: dequantised before it travels
"""

import torch


def quantized_reduce_scatter(x, block, group):
    parts = [quantize_blocks(chunk, block) for chunk in x.chunk(group.size)]
    whole = torch.cat([q.float() * s.repeat_interleave(block)[: len(q)] for q, s in parts])
    arrived = torch.empty_like(whole)
    group.all_to_all(arrived, whole)
    return arrived.view(group.size, -1).sum(0)
