"""The servers send their means as they are.

task: one_bit_mean
says: eight signs go into a byte
"""

import torch


def one_bit_mean(x, worker, server, group):
    whole = x + worker
    scale = whole.abs().mean().view(1)
    bits = pack_signs(whole)
    worker.copy_(whole - unpack_signs(bits) * scale)
    arrived, scales = torch.empty_like(bits), scale.new_empty(group.size)
    group.all_to_all(arrived, bits)
    group.all_gather(scales, scale)
    mine = torch.zeros_like(server)
    for chunk, each in zip(arrived.chunk(group.size), scales, strict=True):
        mine += unpack_signs(chunk) * each / group.size
    mean = torch.empty_like(x)
    group.all_gather(mean, mine)
    return mean
