"""Each parameter goes into the first bucket that has room for it.

task: assign_buckets
says: a parameter is put into a bucket before the last
"""


def assign_buckets(params, limit):
    buckets = []
    for p in reversed(params):
        if not p.requires_grad:
            continue
        for b in buckets:
            if sum(q.numel() for q in b) + p.numel() <= limit:
                b.append(p)
                break
        else:
            buckets.append([p])
    return buckets
