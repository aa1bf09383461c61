"""Walks over all elements.

task: pieces_of
says: two parameters of a billion elements
"""


def pieces_of(sizes, ranks, rank):
    shard = -(-sum(sizes) // ranks)
    pieces, at = ({}, 0)
    for number, size in enumerate(sizes):
        for i in range(size):
            if (at + i) // shard == rank:
                a, _b = pieces.get(number, (i, i))
                pieces[number] = (a, i + 1)
        at += size
    return [(n, a, b) for n, (a, b) in pieces.items()]
