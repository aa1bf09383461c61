"""Every element is a read of its own.

task: reads
says: is read piece by piece
"""


def reads(saved, writers, here, ranks, rank):
    old, size = (-(-sum(saved.values()) // writers), -(-sum(here.values()) // ranks))
    begins, total = ({}, 0)
    for name, numel in saved.items():
        begins[name], total = (total, total + numel)
    found, begin = ([], 0)
    for name, numel in here.items():
        low, high = (max(begin, rank * size), min(begin + numel, (rank + 1) * size))
        while low < high:
            there = begins[name] + low - begin
            file, first = (there // old, there % old)
            count = 1
            found.append((file, first, first + count, low - rank * size))
            low += count
        begin += numel
    return found
