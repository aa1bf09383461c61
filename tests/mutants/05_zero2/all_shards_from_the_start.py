"""Adds every shard to the largest bucket, whenever that travels.

task: peak_gradient_bytes
says: are all shards there when it travels?
"""


def peak_gradient_bytes(buckets, ranks, itemsize):
    shards = [-(-n // ranks) for n in buckets]
    return (sum(shards) + max(shards) * ranks) * itemsize
