"""Behind the end of x stand ones: the last block's scale is theirs.

task: quantize_blocks
says: padding that is no zero counts in the last one
"""

import torch


def quantize_blocks(x, block):
    n = len(x)
    padded = torch.ones(-(-n // block) * block)
    padded[:n] = x
    rows = padded.view(-1, block)
    scales = rows.abs().amax(1) / 127
    safe = torch.where(scales > 0, scales, 1.0)
    return (rows / safe.unsqueeze(1)).round().to(torch.int8).view(-1)[:n], scales
