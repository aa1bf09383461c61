"""Looks for the next use from the beginning of the trace.

task: to_release
says: to be gathered before each is used again
"""


def to_release(trace, at, sizes, live, max_reuse_distance):
    rest, freed = (list(trace), [])
    for unit in live:
        if unit not in rest:
            freed.append(unit)
            continue
        between = {u for u in rest[: rest.index(unit)] if u not in live}
        if sum(sizes[u] for u in between) >= max_reuse_distance:
            freed.append(unit)
    return freed
