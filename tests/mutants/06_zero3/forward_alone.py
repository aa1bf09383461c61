"""Backward, which uses the units once more, is left out: no fault of the budget's unit.

task: zero3_bytes
says: Or is backward's order not the opposite of forward's?
"""


def zero3_bytes(units, ranks, itemsize, budget):
    kept = sum(units) // ranks * (2 * itemsize + 8 + 4 * (itemsize < 4))
    most, live, flying = 0, set(), set()
    for at in range(len(units)):
        live.add(at)
        flying.discard(at)
        for ahead in range(at + 1, len(units)):
            under_way = sum(units[i] for i in flying)
            if ahead in live:
                continue
            if not budget or (flying and under_way + units[ahead] > budget):
                break
            live.add(ahead)
            flying.add(ahead)
        most = max(most, sum(units[i] for i in live))
        live.discard(at)
    return {"kept": kept, "gathered": most * itemsize}
