"""Bytes are divided by /.

task: step_traffic
says: bytes are whole numbers
"""


def step_traffic(strategy, buckets, ranks, itemsize):
    padded = sum(-(-n // ranks) * ranks for n in buckets)
    once = padded / ranks * (ranks - 1) * itemsize
    if strategy == "ddp":
        return {"all_reduce": (len(buckets), 2 * once)}
    return {"reduce_scatter": (len(buckets), once), "all_gather": (len(buckets), once)}
