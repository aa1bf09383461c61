"""Halves the interval twenty times, and keeps a part of a millionth.

task: balanced
says: a search by halving needs sums of layers
"""


def balanced(weights, stages):

    def cut(limit):
        bounds, total = ([0], 0.0)
        for i, w in enumerate(weights):
            left = len(weights) - i
            need = stages - len(bounds)
            if i > bounds[-1] and (total + w > limit or left == need):
                bounds.append(i)
                total = 0.0
            total += w
        return [*bounds, len(weights)]

    low, high = (max(weights), sum(weights))
    for _ in range(20):
        mid = (low + high) / 2
        if len(cut(mid)) - 1 <= stages:
            high = mid
        else:
            low = mid
    return cut(high)
