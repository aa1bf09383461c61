"""Counts the shards, not the bucket that travels.

task: peak_gradient_bytes
says: that is what stays in the end
"""


def peak_gradient_bytes(buckets, ranks, itemsize):
    return sum(-(-n // ranks) for n in buckets) * itemsize
