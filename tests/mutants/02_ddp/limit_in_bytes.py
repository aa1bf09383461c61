"""The limit is taken for bytes of fp32.

task: assign_buckets
says: a bucket holds
"""


def assign_buckets(params, limit):
    buckets = []
    room = 0
    for p in reversed(params):
        if not p.requires_grad:
            continue
        if not buckets or p.numel() > room:
            buckets.append([])
            room = limit * 4 // p.element_size()
        buckets[-1].append(p)
        room -= p.numel()
    return buckets
