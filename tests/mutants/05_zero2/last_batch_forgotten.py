"""Rounds the number of backwards down.

task: accumulated_bytes
says: does the last micro-batch, which is not full, count too?
"""


def accumulated_bytes(strategy, params, ranks, itemsize, samples, room):
    once = params // ranks * (ranks - 1) * itemsize
    if strategy == "ddp":
        return {"all_reduce": 2 * once}
    backwards = max(1, samples // room) if strategy == "zero2" else 1
    return {"reduce_scatter": backwards * once, "all_gather": once}
