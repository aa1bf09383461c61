"""Takes ZeRO-1 for ZeRO-2.

task: memory_bytes
says: zero1 does not shard it
"""


def memory_bytes(strategy, params, ranks, itemsize):
    shard = params // ranks
    owned = params if strategy == "ddp" else shard
    return {
        "parameters": itemsize * (shard if strategy == "zero3" else params),
        "gradients": itemsize * owned,
        "optimizer": 8 * owned,
        "master weights": 4 * owned if itemsize < 4 else 0,
    }
