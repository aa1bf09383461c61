"""Believes the paper's 2 Psi also when micro-batches accumulate.

task: accumulated_bytes
says: zero2 sends with each of 3 backwards
"""


def accumulated_bytes(strategy, params, ranks, itemsize, samples, room):
    once = params // ranks * (ranks - 1) * itemsize
    if strategy == "ddp":
        return {"all_reduce": 2 * once}
    backwards = 1
    return {"reduce_scatter": backwards * once, "all_gather": once}
