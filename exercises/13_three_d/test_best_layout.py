"""Grades chapter 13's search: the fastest layout that fits, against all layouts there are."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

from refimpl.grading.compare import require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup

MACHINES: list[tuple[int, int, dict[str, int]]] = [
    (8, 4, {"layers": 4, "heads": 4, "batch": 8, "tokens": 64}),
    (24, 8, {"layers": 6, "heads": 6, "batch": 12, "tokens": 48}),
    (16, 8, {"layers": 3, "heads": 12, "batch": 4, "tokens": 6}),
    (18, 6, {"layers": 3, "heads": 12, "batch": 6, "tokens": 36}),
    (7, 8, {"layers": 7, "heads": 7, "batch": 3, "tokens": 10}),
    (2, 2, {"layers": 2, "heads": 2, "batch": 2, "tokens": 9}),  # of which no zigzag is made
]


@on_ranks(1)
def test_best_layout(answer: Answer, group: WatchedGroup) -> None:
    for gpus, node, model in MACHINES:
        speeds: dict[str, Callable[..., float]] = {
            "data is fastest": lambda dp, pp, cp, tp: pp + cp + tp,
            "tensor is fastest": lambda dp, pp, cp, tp: dp + 2 * pp + 2 * cp,
            "context is fastest": lambda dp, pp, cp, tp: dp + pp + tp,
            "pipeline is fastest": lambda dp, pp, cp, tp: dp + cp + tp,
            "all equally fast": lambda dp, pp, cp, tp: 1.0,
            "data is fastest, by microseconds": lambda dp, pp, cp, tp: 1e-6 * (pp + cp + tp),
        }
        for (speed, seconds), memory in product(speeds.items(), (10_000, 400, 200, 130, 1)):
            case(f"{gpus} GPUs, nodes of {node}, {model}, {memory} bytes; {speed}")
            judge_layout(answer, gpus, node, model, memory, seconds)


def judge_layout(
    answer: Answer, gpus: int, node: int, model: dict[str, int], memory: int, seconds: Callable[..., float]
) -> None:
    def size(dp: int, pp: int, cp: int, tp: int) -> int:
        return 800 // (pp * tp) + 400 // (dp * pp * tp) + 200 // (cp * tp)

    asked: dict[str, list[Any]] = {"bytes_of": [], "seconds_of": []}

    def bytes_of(layout: Any) -> int:
        asked["bytes_of"].append(tuple(layout))
        return size(*layout)

    def seconds_of(layout: Any) -> float:
        asked["seconds_of"].append(tuple(layout))
        return seconds(*layout)

    rules = {
        "tp divides the node": lambda dp, pp, cp, tp: node % tp == 0,
        "tp divides the heads": lambda dp, pp, cp, tp: model["heads"] % tp == 0,
        "pp divides the layers": lambda dp, pp, cp, tp: model["layers"] % pp == 0,
        "dp divides the batch": lambda dp, pp, cp, tp: model["batch"] % dp == 0,
        "2 * cp divides the tokens": lambda dp, pp, cp, tp: model["tokens"] % (2 * cp) == 0,
        "it fits": lambda dp, pp, cp, tp: size(dp, pp, cp, tp) <= memory,
    }
    allowed = [x for x in factors(gpus) if all(rule(*x) for rule in rules.values())]
    try:
        with untouched(model=model):
            found = answer.best_layout(gpus, node, model, memory, bytes_of, seconds_of)
    except ValueError as error:
        require(not allowed, f"there are {len(allowed)} layouts that fit, and yet: ValueError: {error}")
        return
    require(allowed, f"nothing fits the rules and {memory} bytes: a ValueError is expected, found {found}")
    require(isinstance(found, tuple) and len(found) == 4, f"the result is {found!r}, expected (dp, pp, cp, tp)")
    require(math.prod(found) == gpus, f"{found} is {math.prod(found)} GPUs, there are {gpus}")
    broken = [name for name, rule in rules.items() if not rule(*found)]
    require(not broken, f"{found} cannot be: {'; '.join(broken)} does not hold")
    best = min(allowed, key=lambda x: (seconds(*x), -x[0], x[3], x[1]))
    ties = seconds(*found) == seconds(*best)
    why = (
        "equally fast, but of those the larger dp, then the smaller tp, then pp comes first"
        if ties
        else "there is a faster one"
    )
    require(found == best, f"{found} takes {seconds(*found):g} s, {best} {seconds(*best):g} s: {why}")
    for name, calls in asked.items():
        require(len(calls) == len(set(calls)), f"{name} is asked more than once for a layout: keep what it said")
    slow = [x for x in asked["seconds_of"] if size(*x) > memory]
    require(not slow, f"seconds_of is asked for {slow[:2]}, which do not fit: ask bytes_of first")


def factors(gpus: int) -> list[tuple[int, int, int, int]]:
    of = [n for n in range(1, gpus + 1) if gpus % n == 0]
    return [(a, b, c, d) for a, b, c, d in product(of, repeat=4) if a * b * c * d == gpus]
