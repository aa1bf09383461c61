"""Pads the sum of the buckets, not each.

task: step_traffic
says: is each bucket padded by itself?
"""


def step_traffic(strategy, buckets, ranks, itemsize):
    padded = -(-sum(buckets) // ranks) * ranks
    once = padded // ranks * (ranks - 1) * itemsize
    if strategy == "ddp":
        return {"all_reduce": (len(buckets), 2 * once)}
    return {"reduce_scatter": (len(buckets), once), "all_gather": (len(buckets), once)}
