"""The same number of layers for each stage.

task: balanced
says: an equal number of layers a stage does not balance their weights
"""

from collections.abc import Sequence


def balanced(weights: Sequence[float], stages: int) -> list[int]:
    return [round(s * len(weights) / stages) for s in range(stages + 1)]
