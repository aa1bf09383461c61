"""The room that a parameter takes is its number of rows.

task: assign_buckets
says: the limit is 6
"""


def assign_buckets(params, limit):
    buckets, room = [], 0
    for p in reversed(params):
        if not p.requires_grad:
            continue
        if not buckets or p.numel() > room:
            buckets.append([])
            room = limit
        buckets[-1].append(p)
        room -= len(p)
    return buckets
