"""Fewer micro-batches than are late: it counts from below 0.

task: zb_h1
says: the micro-batches are 0 to 1
"""


def zb_h1(order, late):
    result = []
    for kind, stage, k in order:
        result.append((("I" if kind == "B" else kind), stage, k))
        if kind == "B" and k >= late:
            result.append(("W", stage, k - late))
    n = sum(1 for o in order if o[0] == "B")
    return result + [("W", order[0][1], k) for k in range(n - late, n)]
