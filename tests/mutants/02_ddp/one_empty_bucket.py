"""Where nothing is trained there is one bucket, of nothing.

task: assign_buckets
says: there is an empty bucket
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
        buckets[-1].append(p)
        room -= p.numel()
    return buckets or [[]]
