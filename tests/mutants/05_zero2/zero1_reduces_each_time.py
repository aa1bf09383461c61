"""ZeRO-1 need not send before the last backward.

task: accumulated_bytes
says: zero1 does this once a step, not with each backward
"""


def accumulated_bytes(strategy, params, ranks, itemsize, samples, room):
    once = params // ranks * (ranks - 1) * itemsize
    if strategy == "ddp":
        return {"all_reduce": 2 * once}
    backwards = -(-samples // room)
    return {"reduce_scatter": backwards * once, "all_gather": once}
