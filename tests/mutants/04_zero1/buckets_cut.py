"""What does not divide is not sent.

task: step_traffic
says: each bucket is rounded down
"""


def step_traffic(strategy, buckets, ranks, itemsize):
    whole = sum(n // ranks * ranks for n in buckets)
    once = whole // ranks * (ranks - 1) * itemsize
    if strategy == "ddp":
        return {"all_reduce": (len(buckets), 2 * once)}
    return {"reduce_scatter": (len(buckets), once), "all_gather": (len(buckets), once)}
