"""Whole numbers of bytes only.

task: ring_all_reduce_seconds
says: nbytes / N is rounded down
"""


def ring_all_reduce_seconds(nbytes, ranks, alpha, beta):
    return 2 * (ranks - 1) * (alpha + nbytes // ranks * beta)
