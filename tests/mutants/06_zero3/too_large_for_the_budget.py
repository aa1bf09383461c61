"""A unit larger than the budget is never gathered ahead.

task: prefetch
says: larger than the budget is never gathered ahead
"""


def prefetch(trace, at, sizes, live, flying, budget, most_live):
    in_air, alive = sum(sizes[u] for u in flying), sum(sizes[u] for u in live)
    chosen = []
    for unit in trace[at:]:
        if unit in live or unit in chosen:
            continue
        in_air, alive = in_air + sizes[unit], alive + sizes[unit]
        if in_air > budget or alive > most_live:
            break
        chosen.append(unit)
    return chosen
