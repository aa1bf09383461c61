"""Not up to the limit of what may live.

task: prefetch
says: these are not the next units that fit
"""


def prefetch(trace, at, sizes, live, flying, budget, most_live):
    in_air, alive = sum(sizes[u] for u in flying), sum(sizes[u] for u in live)
    chosen = []
    for unit in trace[at:]:
        if unit in live or unit in chosen:
            continue
        flies_alone = in_air == 0 and budget > 0
        in_air, alive = in_air + sizes[unit], alive + sizes[unit]
        if (in_air > budget and (not flies_alone)) or alive >= most_live:
            break
        chosen.append(unit)
    return chosen
