"""The largest of all blocks for every block.

task: quantize_blocks
says: a block has its own
"""

import torch


def quantize_blocks(x, block):
    n = len(x)
    padded = x.new_zeros(-(-n // block) * block, dtype=torch.float32)
    padded[:n] = x
    rows = padded.view(-1, block)
    scales = (rows.abs().max() / 127 if n else torch.tensor(0.0)).expand(len(rows)).clone()
    safe = torch.where(scales > 0, scales, 1.0)
    q = (rows / safe.unsqueeze(1)).round().clamp(-127, 127)
    return (q.to(torch.int8).view(-1)[:n], scales)
