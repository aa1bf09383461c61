"""The bus bandwidth first.

task: bus_bandwidth
says: it is the bus bandwidth: that comes second
"""

original = bus_bandwidth


def bus_bandwidth(op, nbytes, ranks, seconds):
    return original(op, nbytes, ranks, seconds)[::-1]
