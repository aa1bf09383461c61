"""Forgets that ZeRO-3 gathers again for backward.

task: sent_bytes
says: zero3:
says: of parameters, the ledger says
"""


def sent_bytes(strategy, params, ranks, itemsize, micro_batches):
    once = params * itemsize * (ranks - 1) // ranks
    gradients = {"ddp": 2, "zero1": 1, "zero2": micro_batches, "zero3": micro_batches}
    parameters = {"ddp": 0, "zero1": 1, "zero2": 1, "zero3": micro_batches}
    return {"gradients": gradients[strategy] * once, "parameters": parameters[strategy] * once}
