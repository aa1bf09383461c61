"""A stage may be left without a layer.

task: balanced
says: has no layer, and there are enough
"""

from collections.abc import Sequence


def balanced(weights: Sequence[float], stages: int) -> list[int]:
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}  # so many layers -> their best cut so far
    for _ in range(1, stages + 1):
        best = {
            end: min(
                (max(largest, sums[end] - sums[begin]), [*bounds, end])
                for begin, (largest, bounds) in best.items()
                if begin <= end
            )
            for end in range(len(weights) + 1)
        }
    return best[len(weights)][1]
