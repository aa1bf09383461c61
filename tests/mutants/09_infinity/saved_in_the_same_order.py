"""Takes the saved order for the one that is here.

task: reads
says: the saved buffer has another order
"""


def reads(saved, writers, here, ranks, rank):
    old, size = -(-sum(saved.values()) // writers), -(-sum(here.values()) // ranks)
    begins, total = {}, 0
    for name, numel in saved.items():
        begins[name], total = total, total + numel
    found, begin = [], 0
    for numel in here.values():
        low, high = max(begin, rank * size), min(begin + numel, (rank + 1) * size)
        while low < high:
            there = low
            file, first = there // old, there % old
            count = min(high - low, old - first)
            found.append((file, first, first + count, low - rank * size))
            low += count
        begin += numel
    return found
