"""Takes ZeRO-2 to accumulate gradients like ZeRO-1, for which it has no room.

task: sent_bytes
says: zero2:
says: of gradients, the ledger says
says: zero2 does this with each of 4 micro-batches
"""


def sent_bytes(strategy, params, ranks, itemsize, micro_batches):
    once = params * itemsize * (ranks - 1) // ranks
    gradients = {"ddp": 2, "zero1": 1, "zero2": 1, "zero3": micro_batches}
    parameters = {"ddp": 0, "zero1": 1, "zero2": 1, "zero3": 2 * micro_batches}
    return {"gradients": gradients[strategy] * once, "parameters": parameters[strategy] * once}
