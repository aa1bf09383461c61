"""A frozen parameter takes room in the bucket.

task: assign_buckets
says: a bucket is closed although the next parameter would fit
"""


def assign_buckets(params, limit):
    buckets = []
    room = 0
    for p in reversed(params):
        if not p.requires_grad:
            room -= p.numel()
            continue
        if not buckets or p.numel() > room:
            buckets.append([])
            room = limit
        buckets[-1].append(p)
        room -= p.numel()
    return buckets
