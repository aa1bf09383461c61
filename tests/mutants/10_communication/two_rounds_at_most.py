"""Two rounds, whatever the number of ranks.

task: halving_all_reduce
says: messages leave this rank
"""

import torch


def halving_all_reduce(x, group):
    lo, hi, bit, done = (0, x.numel(), 1, [])
    while bit < min(group.size, 4):
        peer = group.rank ^ bit
        mid = lo + (hi - lo + 1) // 2
        keep, give = (slice(mid, hi), slice(lo, mid)) if group.rank & bit else (slice(lo, mid), slice(mid, hi))
        got = torch.empty_like(x[keep])
        group.send_recv(x[give], peer, got, peer)
        x[keep] += got
        done.append((peer, keep, give))
        lo, hi, bit = (keep.start, keep.stop, bit * 2)
    for peer, keep, give in reversed(done):
        group.send_recv(x[keep], peer, x[give], peer)
