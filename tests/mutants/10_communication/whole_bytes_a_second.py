"""The quotient is rounded down.

task: bus_bandwidth
says: rounded
"""


def bus_bandwidth(op, nbytes, ranks, seconds):
    share = (ranks - 1) / ranks
    factor = {
        "all_reduce": 2 * share,
        "reduce_scatter": share,
        "all_gather": share,
        "all_to_all": share,
        "broadcast": 1.0,
        "send": 1.0,
    }
    if op not in factor:
        raise ValueError(f"unknown op {op}")
    algorithm = nbytes * (ranks if op == "all_gather" else 1) // seconds
    return (algorithm, algorithm * factor[op])
