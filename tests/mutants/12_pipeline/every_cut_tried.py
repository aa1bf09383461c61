"""Tries all cuts there are: right, and never done with a real model.

task: balanced
says: never ends
"""

from collections.abc import Sequence


def balanced(weights: Sequence[float], stages: int) -> list[int]:
    def best(first: int, left: int) -> tuple[float, list[int]]:
        if left == 1:
            return sum(weights[first:]), [len(weights)]
        ways = []
        for end in range(first + 1, len(weights) - left + 2):
            rest, bounds = best(end, left - 1)
            ways.append((max(sum(weights[first:end]), rest), [end, *bounds]))
        return min(ways)

    return [0, *best(0, stages)[1]]
