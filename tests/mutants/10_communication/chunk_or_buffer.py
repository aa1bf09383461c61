"""An all-gather's chunk is taken for its buffer.

task: bus_bandwidth
says: the whole buffer is N times that
"""


def bus_bandwidth(op, nbytes, ranks, seconds):
    share = (ranks - 1) / ranks
    factors = {"all_reduce": 2 * share, "broadcast": 1, "send": 1}
    factors |= dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all"), share)
    if op not in factors:
        raise ValueError(f"{op!r} is none of {', '.join(factors)}")
    algorithm = nbytes * 1 / seconds
    return (algorithm, algorithm * factors[op])
