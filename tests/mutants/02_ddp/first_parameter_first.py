"""Buckets are filled from the first parameter on, which backward reaches last.

task: assign_buckets
says: wrong order: backward reaches the last parameter first
"""


def assign_buckets(params, limit):
    buckets, room = [], 0
    for p in params:
        if p.requires_grad:
            if not buckets or p.numel() > room:
                buckets.append([])
                room = limit
            buckets[-1].append(p)
            room -= p.numel()
    return buckets
