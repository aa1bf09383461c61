"""Takes the caller's list of units apart.

task: zero3_bytes
says: the caller's list `units` was changed
"""

_right = zero3_bytes


def zero3_bytes(units, ranks, itemsize, budget):
    found = _right(units, ranks, itemsize, budget)
    units.clear()
    return found
