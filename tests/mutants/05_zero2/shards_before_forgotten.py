"""The peak of each bucket by itself.

task: peak_gradient_bytes
says: the shards of the buckets before stay
"""


def peak_gradient_bytes(buckets, ranks, itemsize):
    return max(-(-n // ranks) * (ranks + 1) for n in buckets) * itemsize
