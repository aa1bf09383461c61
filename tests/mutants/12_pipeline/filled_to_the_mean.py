"""Fills each stage until it has its share.

task: balanced
says: filling stage by stage is not enough
"""

from collections.abc import Sequence


def balanced(weights: Sequence[float], stages: int) -> list[int]:
    share, bounds, total = sum(weights) / stages, [0], 0.0
    for i, weight in enumerate(weights):
        total += weight
        left = stages - len(bounds)
        if left and i + 1 > bounds[-1] and (total >= share or len(weights) - i - 1 == left):
            bounds.append(i + 1)
            total = 0.0
    while len(bounds) < stages:
        bounds.append(bounds[-1])
    return [*bounds, len(weights)]
