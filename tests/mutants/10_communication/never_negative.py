"""Four bits read as 0 to 15.

task: unpack_int4
says: 8 to 15 are the negative numbers
"""

import torch


def unpack_int4(packed, n):
    nibbles = torch.stack([packed & 15, packed >> 4], dim=1).view(-1)[:n].to(torch.int8)
    return nibbles
