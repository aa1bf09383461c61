"""Every element takes 4 bytes on the wire.

task: accumulated_bytes
says: exactly 2x
"""


def accumulated_bytes(strategy, params, ranks, itemsize, samples, room):
    once = params // ranks * (ranks - 1) * 4
    if strategy == "ddp":
        return {"all_reduce": 2 * once}
    backwards = -(-samples // room) if strategy == "zero2" else 1
    return {"reduce_scatter": backwards * once, "all_gather": once}
