"""Every element takes 4 bytes on the wire.

task: step_traffic
says: an element counts as 4 bytes
"""


def step_traffic(strategy, buckets, ranks, itemsize):
    padded = sum(-(-n // ranks) * ranks for n in buckets)
    once = padded // ranks * (ranks - 1) * 4
    if strategy == "ddp":
        return {"all_reduce": (len(buckets), 2 * once)}
    return {"reduce_scatter": (len(buckets), once), "all_gather": (len(buckets), once)}
