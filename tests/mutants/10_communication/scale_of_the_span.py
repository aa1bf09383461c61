"""The scale of a range that need not be the same on both sides of 0.

task: quantize_blocks
says: of the span from the least to the largest
"""

import torch


def quantize_blocks(x, block):
    n = len(x)
    padded = torch.zeros(-(-n // block) * block)
    padded[:n] = x
    rows = padded.view(-1, block)
    span = rows.amax(1) - rows.amin(1)
    scales = span / 254
    q = torch.nan_to_num(rows / scales.unsqueeze(1)).round().clamp(-127, 127)
    return q.to(torch.int8).view(-1)[:n], scales
