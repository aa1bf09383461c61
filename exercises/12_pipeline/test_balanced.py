"""Grades chapter 12's partition against all cuts there are, and a long chain against refimpl's."""

import itertools
from collections.abc import Sequence

import torch

from refimpl.grading.compare import Wrong, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup
from refimpl.parallel.pipeline.partition import balanced

SMALL = [
    [5, 1, 1, 1, 1, 5],
    [1, 1, 1, 1, 9],
    [0, 0, 3, 0, 0],
    [2.5, 0.25, 4.0, 1.75, 0.5, 3.25, 1.0],
    [7],
    [3, 1, 4, 1, 5, 9, 2, 6],
    [600, 400, 0.02, 600, 399.99],  # two cuts that differ in the sixth digit
    [10**12 + n for n in (7, 3, 9, 1, 8, 2, 6)],  # in the twelfth
]


@on_ranks(1)
def test_balanced(answer: Answer, group: WatchedGroup) -> None:
    torch.manual_seed(0)
    drawn = [torch.randint(1, 30, (n,)).tolist() for n in (6, 9, 11)]
    for weights in [*SMALL, *drawn, [w * 1e-7 for w in drawn[1]]]:  # seconds, for one
        for stages in range(1, min(len(weights), 5) + 1):
            case(f"weights {weights}, {stages} stages")
            cuts = ([0, *cut, len(weights)] for cut in itertools.combinations(range(1, len(weights)), stages - 1))
            judge_cut(answer, weights, stages, min(largest(weights, cut) for cut in cuts))
    case("weights in a tuple")
    require(answer.balanced((1, 2, 3), 2) == [0, 2, 3], "balanced((1, 2, 3), 2) must be [0, 2, 3]")
    case("200 layers, 16 stages")
    many = torch.rand(200).tolist()
    judge_cut(answer, many, 16, largest(many, balanced(many, 16)))


def largest(weights: Sequence[float], bounds: Sequence[int]) -> float:
    return max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds))


def judge_cut(answer: Answer, weights: list[float], stages: int, least: float) -> None:
    with untouched(weights=weights):
        found = answer.balanced(weights, stages)
    is_list = isinstance(found, list) and all(isinstance(b, int) for b in found)
    require(is_list, f"the result is {found!r}, expected a list of {stages + 1} bounds")
    require(
        len(found) == stages + 1, f"{len(found)} bounds {found}, expected {stages + 1}: 0, and the end of each stage"
    )
    ends = (found[0], found[-1]) == (0, len(weights))
    require(ends, f"bounds {found} must begin with 0 and end with {len(weights)}, or layers are left out")
    empty = [s for s, (a, b) in enumerate(itertools.pairwise(found)) if b <= a]
    require(not empty, f"bounds {found}: stage {', '.join(map(str, empty))} has no layer, and there are enough")
    worst = largest(weights, found)
    sums = [round(sum(weights[a:b]), 3) for a, b in itertools.pairwise(found)]
    if worst <= least + 1e-14 * max(1, least):
        return
    even = [round(s * len(weights) / stages) for s in range(stages + 1)]
    advice = "filling stage by stage is not enough: try every place where the last stage could begin"
    if found == even:
        advice = "an equal number of layers a stage does not balance their weights"
    near = worst - least < 1e-6 * least
    advice = "exactly: a search by halving needs sums of layers, or more halvings" if near else advice
    headline = f"the largest stage has {worst:.15g}, and {least:.15g} is possible: {advice}"
    raise Wrong(headline, f"  bounds {found}, sums {sums}")
