"""n is not looked at.

task: unpack_int4
says: the last one is padding
"""

import torch


def unpack_int4(packed, n):
    nibbles = torch.stack([packed & 15, packed >> 4], dim=1).view(-1).to(torch.int8)
    return (nibbles ^ 8) - 8
