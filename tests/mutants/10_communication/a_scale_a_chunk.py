"""Each chunk of the signs has its own scale, sent by an all-to-all.

task: one_bit_mean
says: one_bit_mean sends the right bytes by other collectives than expected
"""

import torch


def one_bit_mean(x, worker, server, group):
    parts = (x + worker).view(group.size, -1)
    scale = parts.abs().mean(1)
    bits = pack_signs(parts.flatten())
    worker.copy_((parts - unpack_signs(bits).view_as(parts) * scale[:, None]).flatten())
    arrived, scales = torch.empty_like(bits), torch.empty_like(scale)
    group.all_to_all(arrived, bits)
    group.all_to_all(scales, scale)
    mean = (unpack_signs(arrived).view(group.size, -1) * scales[:, None]).mean(0) + server
    scale, bits = mean.abs().mean(), pack_signs(mean)
    server.copy_(mean - unpack_signs(bits) * scale)
    every, scales = torch.empty(group.size * len(bits), dtype=torch.uint8), torch.empty(group.size)
    group.all_gather(every, bits)
    group.all_gather(scales, scale.view(1))
    return (unpack_signs(every).view(group.size, -1) * scales[:, None]).flatten()
