"""0 to 15 instead of two's complement.

task: pack_int4
says: two's complement
"""

import torch


def pack_int4(q):
    nibbles = (q + 8).view(torch.uint8)
    packed = nibbles[::2].clone()
    packed[: len(q) // 2] |= nibbles[1::2] << 4
    return packed
