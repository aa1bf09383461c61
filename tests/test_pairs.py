"""The cases of tests/pairs.py: every two values meet, in few cases."""

from itertools import combinations

import pytest
from pairs import pairwise


@pytest.mark.parametrize(
    ("choices", "cases"),
    [((2, 2, 2), 4), ((4, 2, 3), 12), ((2, 2, 3), 6), ((4, 2, 2), 8), ((4, 3, 2, 2), 12)],
)
def test_every_two_values_meet(choices: tuple[int, ...], cases: int) -> None:
    found = pairwise(*map(range, choices))
    assert len(found) == len(set(found)) == cases
    for a, b in combinations(range(len(choices)), 2):
        assert {(case[a], case[b]) for case in found} == {(i, j) for i in range(choices[a]) for j in range(choices[b])}
