"""What is added up travels as fp32, what is complete does not.

task: halving_all_reduce
says: fp32 travels
"""

import torch


def halving_all_reduce(x, group):
    lo, hi, spans = (0, x.numel(), [])
    bit = 1
    while bit < group.size:
        peer = group.rank ^ bit
        mid = lo + (hi - lo + 1) // 2
        keep, give = ((lo, mid), (mid, hi)) if not group.rank & bit else ((mid, hi), (lo, mid))
        got = torch.empty(keep[1] - keep[0])
        group.send_recv(x[give[0] : give[1]].float(), peer, got, peer)
        x[keep[0] : keep[1]] += got.to(x.dtype)
        spans.append((peer, keep, give))
        lo, hi = keep
        bit *= 2
    for peer, keep, give in reversed(spans):
        group.send_recv(x[keep[0] : keep[1]].clone(), peer, x[give[0] : give[1]], peer)
