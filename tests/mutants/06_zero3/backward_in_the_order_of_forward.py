"""Backward walks the units as forward did.

task: zero3_bytes
says: is backward's order not the opposite of forward's
"""


def zero3_bytes(units, ranks, itemsize, budget):
    kept = sum(units) // ranks * (2 * itemsize + 8 + (4 if itemsize < 4 else 0))
    trace = [*range(len(units)), *range(len(units))]
    flying = []
    peak = 0
    for at, now in enumerate(trace):
        flying = [u for u in flying if u != now]
        for unit in trace[at + 1 :]:
            if unit == now or unit in flying:
                continue
            if sum(units[u] for u in [*flying, unit]) > budget and (flying or not budget):
                break
            flying.append(unit)
        peak = max(peak, units[now] + sum(units[u] for u in flying))
    return {"kept": kept, "gathered": peak * itemsize}
