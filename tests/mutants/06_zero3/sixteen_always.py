"""16 bytes a parameter, which fp32 and 16 bits happen to share.

task: zero3_bytes
says: fp64 needs no masters
"""

right = zero3_bytes


def zero3_bytes(units, ranks, itemsize, budget):
    return right(units, ranks, itemsize, budget) | {"kept": sum(units) // ranks * 16}
