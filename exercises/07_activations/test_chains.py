"""Grades chapter 07's plans for a chain of layers: every k, and every way there is, followed by hand."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from refimpl.grading.compare import Wrong, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup


@on_ranks(1)
def test_stretches(answer: Answer, group: WatchedGroup) -> None:
    for layers, saved in itertools.product((1, 2, 4, 9, 10, 17, 36, 48), (0, 0.5, 1, 3, 15)):
        case(f"{layers} layers, {saved} kept beside each input")
        found = answer.stretches(layers, saved)
        require(isinstance(found, list), f"the result is {found!r}, expected a list of (first, stop)")
        found = [tuple(pair) for pair in found]
        run = [i for first, stop in found for i in range(first, stop)]
        require(run == list(range(layers)), f"the stretches {found} do not run each of {layers} layers once, in order")
        peaks = {k: -(-layers // k) + k * saved + k - 1 for k in range(1, layers + 1)}
        least = min(peaks, key=lambda k: (peaks[k], k))
        k = found[0][1] - found[0][0]
        if k != least:
            root = math.isqrt(layers - 1) + 1
            hint = ": of equally good ones the smallest is asked" if peaks.get(k) == peaks[least] else ""
            hint += "; sqrt(layers) is right only where a layer keeps no more than its input" if k == root else ""
            evidence = f"with stretches of {k} the peak is {peaks[k]:g}, with {least} it is {peaks[least]:g} inputs"
            raise Wrong(f"stretches of {k}, expected {least}{hint}", evidence)
        expected = [(first, min(first + k, layers)) for first in range(0, layers, k)]
        require(found == expected, f"stretches {found}, expected {expected}: only the last one may be shorter")


CHAINS: list[tuple[list[float], list[int], list[int]]] = [
    ([1, 1], [1, 1], [4, 4]),
    ([2.0], [3], [5]),
    ([1, 1, 1, 1, 1], [1] * 5, [3] * 5),
    ([1, 10, 1, 1], [2, 1, 3, 1], [5, 2, 7, 3]),
    ([5, 1, 1, 4, 2], [1, 2, 1, 2, 1], [3, 9, 1, 4, 6]),
    ([0.5, 0.25, 1.5], [1, 1, 1], [4, 4, 4]),
]


def every_way(i: int, t: int) -> list[tuple[Any, ...]]:
    """All plans for layers i to t - 1: nested tuples of ("keep", i) and ("again", i, j, plan of the second run)."""
    if i == t:
        return [()]
    plans: list[tuple[Any, ...]] = [(("keep", i), *rest) for rest in every_way(i + 1, t)]
    for j in range(i + 1, t):
        plans += [(("again", i, j, inside), *rest) for rest in every_way(j, t) for inside in every_way(i, j)]
    return plans


def cost(
    plan: tuple[Any, ...], chain: tuple[list[float], list[int], list[int]], t: int, room: int, held: bool = False
) -> Iterator[float]:
    """Seconds of each step of a plan, inf where it does not fit: followed by hand, not by recursion over bytes.

    held: as if a second run had not the bytes of the input behind it, which is no longer there.
    """
    seconds, inputs, saved = chain
    left, again = room, []
    for part in plan:
        stop = part[1] + 1 if part[0] == "keep" else part[2]
        yield sum(seconds[part[1] : stop])
        if part[0] == "keep":
            left -= saved[part[1]]
            yield 0.0 if left >= 0 else math.inf
        else:
            again.append((part, left - inputs[stop] * held))
        left -= inputs[stop] if stop < t else 0
        yield 0.0 if left >= 0 else math.inf
    for (_, _, j, inside), free in again:
        yield from cost(inside, chain, j, free, held)


@on_ranks(1)
def test_least_time(answer: Answer, group: WatchedGroup) -> None:
    for seconds, inputs, saved in CHAINS:
        layers = len(seconds)
        plans = every_way(0, layers)
        for budget in range(sum(inputs) + sum(saved) + 2):
            case(f"seconds {seconds}, inputs {inputs}, saved {saved}, {budget} bytes")
            expected = min(sum(cost(plan, (seconds, inputs, saved), layers, budget)) for plan in plans)
            with untouched(seconds=seconds, inputs=inputs, saved=saved):
                found = answer.least_time(seconds, inputs, saved, budget)
            judge_time(found, expected, (seconds, inputs, saved), budget)
    case("seconds [1, 1], inputs [997, 997], saved [3989, 3989], 4986 bytes: whole numbers, large ones too")
    exact = answer.least_time([1.0, 1.0], [997, 997], [3989, 3989], 4986)
    require(exact == 3, f"{exact} seconds, expected 3: both layers run, the first again, and it fits to the byte")
    case("30 layers: each (i, t, m) computed once")
    found = answer.least_time([1.0] * 30, [1] * 30, [3] * 30, 34)
    require(
        isinstance(found, int | float) and 30 < found < 60, f"{found} seconds for 30 layers of 1 second in 34 bytes"
    )


def judge_time(found: object, expected: float, chain: tuple[list[float], list[int], list[int]], budget: int) -> None:
    require(isinstance(found, int | float), f"the result is {found!r}, expected a number of seconds")
    assert isinstance(found, int | float)
    if math.isclose(found, expected) or found == expected:
        return
    layers = len(chain[0])
    flat = [p for p in every_way(0, layers) if all(s[0] == "keep" or all(q[0] == "keep" for q in s[3]) for s in p)]
    unnested = min(sum(cost(plan, chain, layers, budget)) for plan in flat)
    evidence = f"expected {expected:g}, found {found:g}"
    if expected == math.inf:
        raise Wrong(f"{budget} bytes are too few, and yet there is a result: what keeps more than is left?", evidence)
    reasons = {
        "a second run has all m bytes: the input behind its stretch is no longer there": min(
            sum(cost(plan, chain, layers, budget, held=True)) for plan in every_way(0, layers)
        ),
        "a stretch that runs again keeps all of itself: its second run may be planned as well": unnested,
    }
    if said := [reason for reason, seconds in reasons.items() if found == seconds]:
        raise Wrong(" (or: ".join(said) + ")" * (len(said) - 1), evidence)
    if found < expected:
        raise Wrong("less than is possible: is every byte taken, and each second run counted?", evidence)
    fits = "it can be done: a layer that keeps exactly what is left still fits" if found == math.inf else ""
    raise Wrong(fits or "there is a plan that takes less: is each way tried, every j between i and t?", evidence)
