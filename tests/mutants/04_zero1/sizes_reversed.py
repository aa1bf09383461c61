"""The caller's list of sizes is turned round.

task: pieces_of
says: the caller's list `sizes` was changed
"""


def pieces_of(sizes, ranks, rank):
    shard = -(-sum(sizes) // ranks)
    pieces, at = ([], 0)
    given = list(sizes)
    sizes.reverse()
    for number, size in enumerate(given):
        start, stop = (max(rank * shard, at), min((rank + 1) * shard, at + size))
        if start < stop:
            pieces.append((number, start - at, stop - at))
        at += size
    return pieces
