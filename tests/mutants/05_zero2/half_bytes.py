"""Bytes are no whole number.

task: peak_gradient_bytes
says: a whole number of bytes
"""


def peak_gradient_bytes(buckets, ranks, itemsize):
    kept = peak = 0
    for numel in buckets:
        shard = -(-numel // ranks) * 1.0
        kept += shard
        peak = max(peak, kept + shard * ranks)
    return peak * itemsize
