"""Every element takes 4 bytes on the wire.

task: sent_bytes
says: an element has `itemsize` bytes
"""


def sent_bytes(strategy, params, ranks, itemsize, micro_batches):
    once = params * 4 * (ranks - 1) // ranks
    gradients = {"ddp": 2, "zero1": 1, "zero2": micro_batches, "zero3": micro_batches}
    parameters = {"ddp": 0, "zero1": 1, "zero2": 1, "zero3": 2 * micro_batches}
    return {"gradients": gradients[strategy] * once, "parameters": parameters[strategy] * once}
