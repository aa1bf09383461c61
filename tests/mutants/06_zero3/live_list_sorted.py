"""The caller's list of live units is put into another order.

task: to_release
says: the caller's list `live` was changed
"""


def to_release(trace, at, sizes, live, max_reuse_distance):
    rest, freed = (list(trace[at:]), [])
    live.sort(key=trace.index)
    live.reverse()
    for unit in live:
        if unit not in rest:
            freed.append(unit)
            continue
        between = {u for u in rest[: rest.index(unit)] if u not in live}
        if sum(sizes[u] for u in between) >= max_reuse_distance:
            freed.append(unit)
    return freed
