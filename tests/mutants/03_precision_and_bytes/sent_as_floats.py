"""Bytes are divided by /.

task: sent_bytes
says: bytes are whole numbers
"""


def sent_bytes(strategy, params, ranks, itemsize, micro_batches):
    once = params * itemsize * (ranks - 1) / ranks
    gradients = {"ddp": 2, "zero1": 1, "zero2": micro_batches, "zero3": micro_batches}
    parameters = {"ddp": 0, "zero1": 1, "zero2": 1, "zero3": 2 * micro_batches}
    return {"gradients": gradients[strategy] * once, "parameters": parameters[strategy] * once}
