"""The caller's list is emptied from its end.

task: assign_buckets
says: the caller's list `params` was changed
"""


def assign_buckets(params, limit):
    buckets = []
    room = 0
    while params:
        p = params.pop()
        if not p.requires_grad:
            continue
        if not buckets or p.numel() > room:
            buckets.append([])
            room = limit
        buckets[-1].append(p)
        room -= p.numel()
    return buckets
