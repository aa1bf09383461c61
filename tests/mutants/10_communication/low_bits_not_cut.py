"""Both numbers keep their eight bits.

task: pack_int4
says: cut its eight bits down to four
"""

import torch


def pack_int4(q):
    low = q[::2].clone()
    low[: len(q) // 2] |= q[1::2] << 4
    return low.view(torch.uint8)
