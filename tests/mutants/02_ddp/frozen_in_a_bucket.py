"""Frozen parameters fill buckets too; their gradients never come.

task: assign_buckets
says: a frozen parameter is in a bucket
"""


def assign_buckets(params, limit):
    buckets, room = [], 0
    for p in reversed(params):
        if not buckets or p.numel() > room:
            buckets.append([])
            room = limit
        buckets[-1].append(p)
        room -= p.numel()
    return buckets
