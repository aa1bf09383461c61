"""x is quantised as a whole: blocks begin in one chunk and end in the next.

task: quantized_reduce_scatter
says: blocks begin in one rank's chunk
"""

import torch


def quantized_reduce_scatter(x, block, group):
    count = len(x) // group.size
    q, scales = quantize_blocks(x, block)
    scales = torch.cat([scales[i * count // block :][: -(-count // block)] for i in range(group.size)])
    got_q, got_scales = (torch.empty_like(q), torch.empty_like(scales))
    group.all_to_all(got_q, q)
    group.all_to_all(got_scales, scales)
    total = torch.zeros(len(x) // group.size)
    for chunk, scale in zip(got_q.chunk(group.size), got_scales.chunk(group.size), strict=True):
        total += chunk.float() * scale.repeat_interleave(block)[: len(chunk)]
    return total
