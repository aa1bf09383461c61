"""Master weights beside parameters that are fp32 already.

task: memory_bytes
says: a model of torch.float32 has none, it is its own master
"""


def memory_bytes(strategy, params, ranks, itemsize):
    level, part = ("ddp", "zero1", "zero2", "zero3").index(strategy), params // ranks
    return {
        "parameters": itemsize * (part if level >= 3 else params),
        "gradients": itemsize * (part if level >= 2 else params),
        "optimizer": 8 * (part if level >= 1 else params),
        "master weights": 4 * (part if level >= 1 else params),
    }
