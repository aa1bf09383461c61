"""Searches for the least largest sum among whole numbers.

task: balanced
says: is possible: filling stage by stage is not enough
"""

from collections.abc import Sequence


def balanced(weights: Sequence[float], stages: int) -> list[int]:
    def cut(most: float) -> list[int]:
        bounds, total = [0], 0.0
        for i, weight in enumerate(weights):
            must = len(weights) - i == stages - len(bounds)
            if i > bounds[-1] and (total + weight > most or must) and len(bounds) < stages:
                bounds.append(i)
                total = 0.0
            total += weight
        return [*bounds, len(weights)]

    def largest(bounds: list[int]) -> float:
        return max(sum(weights[bounds[s] : bounds[s + 1]]) for s in range(stages))

    most = int(max(weights))
    while largest(found := cut(most)) > most:
        most += 1
    return found
