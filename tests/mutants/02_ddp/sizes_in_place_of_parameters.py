"""The sizes of the parameters are given out.

task: assign_buckets
says: no list of lists of parameters
"""


def assign_buckets(params, limit):
    buckets = []
    room = 0
    for p in reversed(params):
        if not p.requires_grad:
            continue
        if not buckets or p.numel() > room:
            buckets.append([])
            room = limit
        buckets[-1].append(p.numel())
        room -= p.numel()
    return buckets
