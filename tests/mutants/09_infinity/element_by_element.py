"""Walks over all elements of the model.

task: reads
says: two parameters of a billion elements
"""


def reads(saved, writers, here, ranks, rank):
    old, size = (-(-sum(saved.values()) // writers), -(-sum(here.values()) // ranks))
    at, total = ({}, 0)
    for name, n in saved.items():
        at[name], total = (total, total + n)
    flat = [at[name] + i for name, n in here.items() for i in range(n)]
    found = []
    for place, there in enumerate(flat[rank * size : (rank + 1) * size]):
        file, first = divmod(there, old)
        if found and found[-1][0] == file and (found[-1][2] == first):
            found[-1] = (file, found[-1][1], first + 1, found[-1][3])
        else:
            found.append((file, first, first + 1, place))
    return found
