"""Passes over a unit that is too large, and takes smaller ones behind it.

task: prefetch
says: a later unit is taken although one before it does not fit
"""


def prefetch(trace, at, sizes, live, flying, budget, most_live):
    in_air, alive = (sum(sizes[u] for u in flying), sum(sizes[u] for u in live))
    chosen = []
    for unit in trace[at:]:
        if unit in live or unit in chosen:
            continue
        too_much = in_air + sizes[unit] > budget and (in_air or not budget)
        if too_much or alive + sizes[unit] > most_live:
            continue
        in_air, alive = (in_air + sizes[unit], alive + sizes[unit])
        chosen.append(unit)
    return chosen
