"""All of the parameters in place of (N - 1)/N of them.

task: sent_bytes
says: a rank keeps its own part, and sends
"""


def sent_bytes(strategy, params, ranks, itemsize, micro_batches):
    gradients = {"ddp": 2, "zero1": 1}.get(strategy, micro_batches)
    gathers = {"ddp": 0, "zero1": 1, "zero2": 1, "zero3": 2 * micro_batches}[strategy]
    return {"gradients": gradients * params * itemsize, "parameters": gathers * params * itemsize}
