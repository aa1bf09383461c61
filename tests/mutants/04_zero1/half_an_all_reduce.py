"""Takes an all-reduce for one pass over the ring.

task: step_traffic
says: exactly half, and an all-reduce has two halves
"""


def step_traffic(strategy, buckets, ranks, itemsize):
    padded = sum(-(-n // ranks) * ranks for n in buckets)
    once = padded // ranks * (ranks - 1) * itemsize
    if strategy == "ddp":
        return {"all_reduce": (len(buckets), once)}
    return {"reduce_scatter": (len(buckets), once), "all_gather": (len(buckets), once)}
