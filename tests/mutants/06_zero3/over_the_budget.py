"""Stops after the unit that breaks the budget, not before.

task: prefetch
says: bytes would be
"""


def prefetch(trace, at, sizes, live, flying, budget, most_live):
    in_air, alive = (sum(sizes[u] for u in flying), sum(sizes[u] for u in live))
    chosen = []
    for unit in trace[at:]:
        if unit in live or unit in chosen:
            continue
        in_air, alive = (in_air + sizes[unit], alive + sizes[unit])
        chosen.append(unit)
        if in_air > budget or alive > most_live:
            break
    return chosen
