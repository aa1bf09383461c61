"""The caller's set of live units grows with what is chosen.

task: prefetch
says: the caller's set `live` was changed
"""


def prefetch(trace, at, sizes, live, flying, budget, most_live):
    in_air, alive = (sum(sizes[u] for u in flying), sum(sizes[u] for u in live))
    chosen = []
    for unit in trace[at:]:
        if unit in live or unit in chosen:
            continue
        flies_alone = in_air == 0 and budget > 0
        in_air, alive = (in_air + sizes[unit], alive + sizes[unit])
        if (in_air > budget and (not flies_alone)) or alive > most_live:
            break
        chosen.append(unit)
        live.add(unit)
    return chosen
