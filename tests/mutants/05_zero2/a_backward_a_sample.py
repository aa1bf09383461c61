"""As if each sample had a backward of its own.

task: accumulated_bytes
says: that is with each of 4 samples, and a backward takes 4 at once
"""


def accumulated_bytes(strategy, params, ranks, itemsize, samples, room):
    once = params // ranks * (ranks - 1) * itemsize
    if strategy == "ddp":
        return {"all_reduce": 2 * once}
    return {"reduce_scatter": (samples if strategy == "zero2" else 1) * once, "all_gather": once}
