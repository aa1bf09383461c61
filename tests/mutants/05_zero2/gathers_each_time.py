"""Gathers weights that have not changed.

task: accumulated_bytes
says: zero2 does this once a step, not with each backward
"""


def accumulated_bytes(strategy, params, ranks, itemsize, samples, room):
    once = params // ranks * (ranks - 1) * itemsize
    if strategy == "ddp":
        return {"all_reduce": 2 * once}
    backwards = -(-samples // room) if strategy == "zero2" else 1
    return {"reduce_scatter": backwards * once, "all_gather": backwards * once}
