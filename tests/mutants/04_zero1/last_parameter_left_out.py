"""A parameter that ends with the shard is not seen in it.

task: pieces_of
says: is left out: elements
"""


def pieces_of(sizes, ranks, rank):
    shard = -(-sum(sizes) // ranks)
    pieces, at = ([], 0)
    for number, size in enumerate(sizes):
        start, stop = (max(rank * shard, at), min((rank + 1) * shard, at + size))
        if start < stop and at + size != (rank + 1) * shard:
            pieces.append((number, start - at, stop - at))
        at += size
    return pieces
