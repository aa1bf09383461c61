"""A parameter belongs to the rank in whose shard it begins.

task: pieces_of
says: whole parameters are given out
"""


def pieces_of(sizes, ranks, rank):
    shard = -(-sum(sizes) // ranks)
    pieces, at = ([], 0)
    for number, size in enumerate(sizes):
        start, stop = (at, at + size) if rank * shard <= at < (rank + 1) * shard else (at, at)
        if start < stop:
            pieces.append((number, start - at, stop - at))
        at += size
    return pieces
