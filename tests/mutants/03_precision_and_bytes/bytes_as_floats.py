"""Bytes are divided by /.

task: memory_bytes
says: bytes are whole numbers
"""


def memory_bytes(strategy, params, ranks, itemsize):
    shard = params // ranks
    owned = params if strategy == "ddp" else shard
    return {
        "parameters": itemsize * (shard if strategy == "zero3" else params),
        "gradients": itemsize * (shard if strategy in ("zero2", "zero3") else params),
        "optimizer": 8 * params / ranks if strategy != "ddp" else 8 * params,
        "master weights": 4 * owned if itemsize < 4 else 0,
    }
