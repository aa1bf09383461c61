"""Counts units in between that are live and need no gather.

task: to_release
says: bytes are gathered: keep it
"""


def to_release(trace, at, sizes, live, max_reuse_distance):
    rest, freed = (list(trace[at:]), [])
    for unit in live:
        if unit not in rest:
            freed.append(unit)
            continue
        between = set(rest[: rest.index(unit)])
        if sum(sizes[u] for u in between) >= max_reuse_distance:
            freed.append(unit)
    return freed
