"""Bytes are divided by /.

task: accumulated_bytes
says: bytes are whole numbers
"""


def accumulated_bytes(strategy, params, ranks, itemsize, samples, room):
    once = params / ranks * (ranks - 1) * itemsize
    if strategy == "ddp":
        return {"all_reduce": 2 * once}
    backwards = -(-samples // room) if strategy == "zero2" else 1
    return {"reduce_scatter": backwards * once, "all_gather": once}
