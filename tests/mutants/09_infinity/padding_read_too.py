"""Cuts the flat buffers as they are, padding and all.

task: reads
says: reads padding: it belongs to no parameter
"""


def reads(saved, writers, here, ranks, rank):
    old, size = -(-sum(saved.values()) // writers), -(-sum(here.values()) // ranks)
    found, low = [], rank * size
    high = min(low + size, old * writers)
    while low < high:
        file, first = divmod(low, old)
        count = min(high - low, old - first)
        found.append((file, first, first + count, low - rank * size))
        low += count
    return found
