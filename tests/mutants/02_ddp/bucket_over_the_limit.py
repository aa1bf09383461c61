"""A bucket is closed only once it is over the limit.

task: assign_buckets
says: elements, the limit is
"""


def assign_buckets(params, limit):
    buckets, filled = [], limit
    for p in reversed(params):
        if p.requires_grad:
            if filled >= limit:
                buckets.append([])
                filled = 0
            buckets[-1].append(p)
            filled += p.numel()
    return buckets
