"""Elements where bytes are asked.

task: zero3_bytes
says: these are elements: times `itemsize`
"""

right = zero3_bytes


def zero3_bytes(units, ranks, itemsize, budget):
    whole = right(units, ranks, itemsize, budget)
    return whole | {"gathered": whole["gathered"] // itemsize}
