"""Forgets that the new weights must travel.

task: step_traffic
says: it sends with reduce_scatter, all_gather; you have reduce_scatter
"""


def step_traffic(strategy, buckets, ranks, itemsize):
    padded = sum(-(-n // ranks) * ranks for n in buckets)
    once = padded // ranks * (ranks - 1) * itemsize
    if strategy == "ddp":
        return {"all_reduce": (len(buckets), 2 * once)}
    return {"reduce_scatter": (len(buckets), once)}
