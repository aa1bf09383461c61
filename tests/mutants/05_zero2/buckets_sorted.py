"""The caller's list of buckets is put into another order.

task: peak_gradient_bytes
says: the caller's list `buckets` was changed
"""


def peak_gradient_bytes(buckets, ranks, itemsize):
    kept = peak = 0
    given = list(buckets)
    buckets.sort()
    for numel in given:
        shard = -(-numel // ranks)
        kept += shard
        peak = max(peak, kept + shard * ranks)
    return peak * itemsize
