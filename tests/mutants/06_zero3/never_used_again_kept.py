"""Keeps what the iteration is through with.

task: to_release
says: is not used again: free it
"""


def to_release(trace, at, sizes, live, max_reuse_distance):
    rest, freed = (list(trace[at:]), [])
    for unit in live:
        if unit not in rest:
            continue
        between = {u for u in rest[: rest.index(unit)] if u not in live}
        if sum(sizes[u] for u in between) >= max_reuse_distance:
            freed.append(unit)
    return freed
