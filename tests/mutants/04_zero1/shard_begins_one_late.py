"""The shard of a rank begins one element behind where the one before it ends.

task: pieces_of
says: begins at element
"""


def pieces_of(sizes, ranks, rank):
    shard = -(-sum(sizes) // ranks)
    pieces, at = ([], 0)
    for number, size in enumerate(sizes):
        start, stop = (max(rank * shard + (rank > 0), at), min((rank + 1) * shard, at + size))
        if start < stop:
            pieces.append((number, start - at, stop - at))
        at += size
    return pieces
