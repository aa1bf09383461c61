"""The norm as scale.

task: one_bit_mean
says: the scale is the mean magnitude
"""

import torch


def one_bit_mean(x, worker, server, group):
    n, ranks = (len(x), group.size)
    whole = x + worker
    scale = (whole.norm() / n**0.5).view(1)
    bits = pack_signs(whole)
    worker.copy_(whole - unpack_signs(bits) * scale)
    arrived, scales = (torch.empty_like(bits), scale.new_empty(ranks))
    group.all_to_all(arrived, bits)
    group.all_gather(scales, scale)
    mine = server.clone()
    for chunk, each in zip(arrived.chunk(ranks), scales, strict=True):
        mine += unpack_signs(chunk) * each / ranks
    scale, bits = (mine.abs().mean().view(1), pack_signs(mine))
    server.copy_(mine - unpack_signs(bits) * scale)
    everyones, scales = (bits.new_empty(n // 8), scale.new_empty(ranks))
    group.all_gather(everyones, bits)
    group.all_gather(scales, scale)
    return (unpack_signs(everyones).view(ranks, -1) * scales.unsqueeze(1)).view(-1)
