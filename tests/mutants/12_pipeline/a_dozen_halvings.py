"""Halves the interval in which the least largest sum lies a dozen times.

task: balanced
says: is possible: filling stage by stage is not enough
"""

from collections.abc import Sequence


def balanced(weights: Sequence[float], stages: int) -> list[int]:
    def cut(limit: float) -> list[int]:
        bounds, total = [0], 0.0
        for i, weight in enumerate(weights):
            if total + weight > limit and i > bounds[-1]:
                bounds.append(i)
                total = 0.0
            total += weight
        return [*bounds, len(weights)]

    low, high = max(weights), sum(weights)
    for _ in range(12):
        middle = (low + high) / 2
        if len(cut(middle)) - 1 <= stages:
            high = middle
        else:
            low = middle
    bounds = cut(high)
    while len(bounds) - 1 < stages:
        i = max(range(len(bounds) - 1), key=lambda i: bounds[i + 1] - bounds[i])
        bounds.insert(i + 1, bounds[i] + 1)
    return bounds
