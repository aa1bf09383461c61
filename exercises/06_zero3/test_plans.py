"""Grades chapter 06's plans: what is gathered ahead and what is freed, beside refimpl's own decisions."""

import random
from dataclasses import dataclass

from refimpl.grading.compare import Wrong, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup
from refimpl.zero.config import ZeroConfig
from refimpl.zero.gather.prefetch import Trace, next_ones


@dataclass(eq=False)
class Fake:
    """As much of a refimpl Unit as its plans look at."""

    name: str
    numel: int
    is_free: bool = True
    in_flight: bool = False

    @property
    def padded(self) -> int:
        return self.numel


def draw(seed: int) -> tuple[list[str], int, dict[str, Fake]]:
    """A trace (forward, then backward), a place in it, and units of which some are live and some on their way."""
    rng = random.Random(seed)
    units = {name: Fake(name, rng.randint(1, 20)) for name in "abcdefg"[: rng.randint(3, 7)]}
    trace = [*units, *reversed(units)]
    if seed % 3 == 0:  # not every model's backward is the mirror of its forward
        trace += rng.sample(trace, k=rng.randint(1, len(trace)))
    at = rng.randint(1, len(trace))
    for unit in units.values():
        unit.is_free = rng.random() < 0.6
        unit.in_flight = not unit.is_free and rng.random() < 0.4
    units[trace[at - 1]].is_free, units[trace[at - 1]].in_flight = False, False
    return trace, at, units


def refimpl_trace(trace: list[str], at: int, units: dict[str, Fake]) -> Trace:
    record = Trace()
    record.order = [(units[name], "forward") for name in trace]  # type: ignore[misc]
    record.at = at
    return record


@on_ranks(1)
def test_prefetch(answer: Answer, group: WatchedGroup) -> None:
    for seed in range(90):
        trace, at, units = draw(seed)
        rng = random.Random(1000 + seed)
        sizes = {name: u.numel for name, u in units.items()}
        live, flying = (
            {n for n, u in units.items() if test(u)} for test in (lambda u: not u.is_free, lambda u: u.in_flight)
        )
        budget, most_live = rng.randint(0, 40), rng.choice((1000, rng.randint(10, 60)))
        if seed >= 60:  # no budget, and the limits themselves
            budget = (0, sum(sizes[u] for u in {*flying, *trace[at : at + 1]}), 1000)[seed % 3]
            most_live = 1000 if seed % 3 < 2 else sum(sizes[u] for u in {*live, *trace[at : at + 2]})
        case(f"trace {' '.join(trace)}, at {at}")
        gathered = [unit for unit in units.values() if not unit.is_free]
        limits = ZeroConfig(prefetch_bucket_size=budget, max_live_parameters=most_live)
        now = [units[trace[at - 1]]]
        expected = [u.name for u in next_ones(refimpl_trace(trace, at, units), now, gathered, limits)]  # type: ignore[arg-type]
        with untouched(trace=trace, sizes=sizes, live=live, flying=flying):
            found = answer.prefetch(trace, at, sizes, live, flying, budget, most_live)
        if found == expected:
            continue
        evidence = [
            f"  sizes {sizes}, live {sorted(live)}, flying {sorted(flying)}, budget {budget}, most_live {most_live}",
            f"  expected {expected}",
            f"  found    {found}",
        ]
        require(names(found), f"the result is {found!r}, expected a list of names", *evidence)
        judge_prefetch(found, expected, trace, at, sizes, live, flying, budget, most_live, evidence)


def names(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)


def judge_prefetch(
    found: list[str], expected: list[str], trace: list[str], at: int, sizes: dict[str, int], live: set[str],
    flying: set[str], budget: int, most_live: int, evidence: list[str],
) -> None:  # fmt: skip
    require(not live & set(found), "a unit that is live already is gathered again", *evidence)
    require(len(set(found)) == len(found), "a unit is chosen twice", *evidence)
    aloft = {*found, *flying}
    in_air = sum(sizes[u] for u in aloft)
    fits = in_air <= budget or (len(aloft) == 1 and budget > 0)
    require(fits, f"{in_air} bytes would be on their way, the budget is {budget}", *evidence)
    alone = found == [] and len(expected) == 1 and sizes[expected[0]] > budget
    require(not alone, "a unit larger than the budget is never gathered ahead, although nothing else flies", *evidence)
    alive = sum(sizes[u] for u in {*found, *live})
    require(alive <= most_live, f"{alive} bytes would be live, most_live is {most_live}", *evidence)
    gone = [u for u in found if u not in trace[at:]]
    require(not gone, f"{', '.join(gone)}: this iteration does not use it again; look at trace[at:]", *evidence)
    skipped = found[: len(expected)] == expected
    require(
        not skipped, "a later unit is taken although one before it does not fit: it would come too early", *evidence
    )
    left = trace[at:][: trace[at:].index(expected[len(found)]) + 1] if found == expected[: len(found)] else []
    twice = [u for u in found if left.count(u) > 1]
    counted = f"; {twice[0]} comes twice in the trace before the next that fits, and is gathered once" if twice else ""
    at = next(i for i in range(len(expected) + 1) if found[i : i + 1] != expected[i : i + 1])
    mine, right = ("".join(units[at : at + 1]) for units in (found, expected))
    said = f"{mine} is one too many" if not right else f"{right} is missing, and fits" if not mine else ""
    said = said or f"{right} is next, not {mine}"
    raise Wrong(f"these are not the next units that fit: {said}{counted}", *evidence)


@on_ranks(1)
def test_to_release(answer: Answer, group: WatchedGroup) -> None:
    for seed in range(60):
        trace, at, units = draw(seed)
        limit = random.Random(2000 + seed).choice((0, 1, 10, 25, 1000))
        sizes, live = {n: u.numel for n, u in units.items()}, [n for n, u in units.items() if not u.is_free]
        live = live[::-1] if seed % 2 else live  # an order of its own, not the trace's
        case(f"trace {' '.join(trace)}, at {at}")
        record = refimpl_trace(trace, at, units)
        distances = {name: record.distance(units[name]) for name in live}  # type: ignore[arg-type]
        expected = [n for n, d in distances.items() if d is None or d >= limit]
        with untouched(trace=trace, sizes=sizes, live=live):
            found = answer.to_release(trace, at, sizes, live, limit)
        if found == expected:
            continue
        evidence = [
            f"  sizes {sizes}, live {live}, max_reuse_distance {limit}",
            f"  to be gathered before each is used again: {distances}",
            f"  expected {expected}",
            f"  found    {found}",
        ]
        require(names(found), f"the result is {found!r}, expected a list of names", *evidence)
        require(set(found) <= set(live), "a unit is freed that is not live", *evidence)
        for name in live:
            if (name in found) != (name in expected):
                gone = distances[name]
                why = "is not used again" if gone is None else f"is used again after {gone} bytes are gathered"
                raise Wrong(f"{name} {why}: {'free' if name in expected else 'keep'} it", *evidence)
        raise Wrong("the order should be that of `live`", *evidence)
