"""Every message is taken to carry the whole buffer.

task: ring_all_reduce_seconds
says: a chunk of nbytes / N, not all of nbytes
"""


def ring_all_reduce_seconds(nbytes, ranks, alpha, beta):
    return 2 * (ranks - 1) * (alpha + nbytes * beta)
