"""A unit that the trace names twice takes room twice, and is chosen twice.

task: prefetch
says: comes twice in the trace
"""


def prefetch(trace, at, sizes, live, flying, budget, most_live):
    in_air, alive = sum(sizes[u] for u in flying), sum(sizes[u] for u in live)
    chosen = []
    for unit in trace[at:]:
        if unit in live:
            continue
        alone = in_air == 0 and budget > 0
        in_air, alive = in_air + sizes[unit], alive + sizes[unit]
        if (in_air > budget and not alone) or alive > most_live:
            break
        chosen.append(unit)
    return chosen
