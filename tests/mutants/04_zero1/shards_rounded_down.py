"""The remainder belongs to nobody.

task: pieces_of
says: the shards are rounded down: the last elements belong to nobody
"""


def pieces_of(sizes, ranks, rank):
    shard = sum(sizes) // ranks
    pieces, at = ([], 0)
    for number, size in enumerate(sizes):
        start, stop = (max(rank * shard, at), min((rank + 1) * shard, at + size))
        if start < stop:
            pieces.append((number, start - at, stop - at))
        at += size
    return pieces
