"""An epsilon in the scale: small blocks are lost.

task: quantize_blocks
says: the scales: wrong values
"""

import torch


def quantize_blocks(x, block):
    n = len(x)
    padded = x.new_zeros(-(-n // block) * block, dtype=torch.float32)
    padded[:n] = x
    rows = padded.view(-1, block)
    scales = rows.abs().amax(1).clamp(min=1e-8) / 127
    safe = torch.where(scales > 0, scales, 1.0)
    q = (rows / safe.unsqueeze(1)).round().clamp(-127, 127)
    return (q.to(torch.int8).view(-1)[:n], scales)
