"""An operation that is none is a KeyError.

task: bus_bandwidth
says: all_reduced is no operation: KeyError, expected ValueError
"""

original = bus_bandwidth


def bus_bandwidth(op, nbytes, ranks, seconds):
    try:
        return original(op, nbytes, ranks, seconds)
    except ValueError:
        raise KeyError(op) from None
