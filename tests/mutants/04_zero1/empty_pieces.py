"""A parameter that only touches the shard is listed.

task: pieces_of
says: a piece is empty: leave it out
"""


def pieces_of(sizes, ranks, rank):
    shard = -(-sum(sizes) // ranks)
    pieces, at = ([], 0)
    for number, size in enumerate(sizes):
        start, stop = (max(rank * shard, at), min((rank + 1) * shard, at + size))
        if start <= stop:
            pieces.append((number, start - at, stop - at))
        at += size
    return pieces
