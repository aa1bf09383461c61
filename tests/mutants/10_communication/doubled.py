"""An all-reduce counts its buffer twice.

task: bus_bandwidth
says: the 2 belongs into the bus bandwidth
"""


def bus_bandwidth(op, nbytes, ranks, seconds):
    share = (ranks - 1) / ranks
    factors = {"all_reduce": 2 * share, "broadcast": 1, "send": 1}
    factors |= dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all"), share)
    if op not in factors:
        raise ValueError(f"{op!r} is none of {', '.join(factors)}")
    algorithm = nbytes * (2 if op == "all_reduce" else 1) * (ranks if op == "all_gather" else 1) / seconds
    return (algorithm, nbytes * (ranks if op == "all_gather" else 1) / seconds * factors[op])
