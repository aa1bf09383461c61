"""Fewer cases that leave no two choices unmet: most bugs show where one choice, or two together, are special.

Kuhn, Wallace and Gallo, "Software fault interactions and implications for software testing", 2004.
"""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases, one of each choice, in which any value of one choice meets any value of any other; in product's order."""
    cases = list(product(*(range(len(values)) for values in choices)))
    unmet, chosen = {pair for case in cases for pair in _pairs(case)}, []
    while unmet:
        best = max(cases, key=lambda case: len(_pairs(case) & unmet))
        chosen.append(best)
        unmet -= _pairs(best)
    return [tuple(values[i] for values, i in zip(choices, case, strict=True)) for case in sorted(chosen)]


def _pairs(case: tuple[int, ...]) -> set[Any]:
    """Its choices two by two, as ((which choice, which value), (which choice, which value))."""
    return set(combinations(enumerate(case), 2))
