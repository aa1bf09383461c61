"""Each server begins the sum with its own signs.

task: one_bit_mean
says: rank order
"""

import torch


def one_bit_mean(x, worker, server, group):
    N, n = (group.size, x.numel())
    v = x + worker
    mag = v.abs().mean()
    signs = pack_signs(v)
    worker.copy_(v - unpack_signs(signs) * mag)
    got = torch.empty_like(signs)
    group.all_to_all(got, signs)
    mags = torch.empty(N)
    group.all_gather(mags, mag.view(1))
    total = torch.zeros(n // N)
    for j in range(N):
        r = (group.rank + j) % N
        total += unpack_signs(got.view(N, -1)[r]) * mags[r]
    v2 = total / N + server
    m2 = v2.abs().mean()
    signs2 = pack_signs(v2)
    server.copy_(v2 - unpack_signs(signs2) * m2)
    bits = torch.empty(n // 8, dtype=torch.uint8)
    group.all_gather(bits, signs2)
    ms = torch.empty(N)
    group.all_gather(ms, m2.view(1))
    return unpack_signs(bits) * ms.repeat_interleave(n // N)
