"""Grades chapter 12's tables: what each rank computes, in which order, how much is alive, how long it takes."""

import itertools
from collections import Counter
from collections.abc import Sequence

from refimpl.grading.compare import Wrong, refused, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup
from refimpl.parallel.pipeline import clock
from refimpl.parallel.pipeline.clock import ScheduleError
from refimpl.parallel.pipeline.schedules.named import NAMES, schedule
from refimpl.parallel.pipeline.schedules.table import Cost, Op, Table

Order = list[Op]
GROUPS = "a group of `ranks` micro-batches passes all chunks, then the next"
MULTIPLE = "make the order of the next multiple of `ranks`, and then leave out micro-batches"


@on_ranks(1)
def test_one_f_one_b(answer: Answer, group: WatchedGroup) -> None:
    for p, m in itertools.product((1, 2, 3, 4, 7), (12, 5, 3, 2, 1)):
        table, orders = schedule("1f1b", p, m), []
        for s in range(p):
            case(f"stage {s} of {p}, {m} micro-batches")
            orders.append(read(answer.one_f_one_b(s, p, m), "FB"))
            judge_complete(orders[-1], [s], m, "FB")
            judge_turns(orders[-1], [s])
            judge_alive(orders[-1], table.alive[s], m)
        case(f"all {p} stages, {m} micro-batches")
        judge_clock(orders, table)
        for s, order in enumerate(orders):
            case(f"stage {s} of {p}, {m} micro-batches")
            judge_same(order, table.orders[s], "as many forwards ahead as there are stages behind, then F and B")


@on_ranks(1)
def test_interleaved(answer: Answer, group: WatchedGroup) -> None:
    for p, m, v in [*itertools.product((1, 2, 3, 4), (8, 4, 3, 2, 1), (1, 2, 3)), (6, 13, 4)]:
        table, orders = schedule("interleaved", p, m, v), []
        for r in range(p):
            case(f"rank {r} of {p}, {m} micro-batches, {v} chunks")
            order = read(answer.interleaved(r, p, m, v), "FB")
            neighbours = {r * v + c for c in range(v)}
            apart = table.holds(r) == sorted(neighbours) or {op.stage for op in order} != neighbours
            require(apart, f"rank {r} has stages {sorted(neighbours)}, side by side: chunk c is stage c * ranks + rank")
            judge_complete(order, table.holds(r), m, "FB")
            judge_turns(order, table.holds(r))
            judge_alive(order, table.alive[r], m * v)
            orders.append(order)
        case(f"all {p} ranks, {m} micro-batches, {v} chunks")
        judge_clock(orders, table)
        for r, order in enumerate(orders):
            case(f"rank {r} of {p}, {m} micro-batches, {v} chunks")
            judge_same(order, table.orders[r], GROUPS if m % p == 0 else MULTIPLE)


@on_ranks(1)
def test_zb_h1(answer: Answer, group: WatchedGroup) -> None:
    for name, p, m in (("1f1b", 3, 5), ("1f1b", 4, 2), ("gpipe", 2, 4)):
        for s, late in itertools.product(range(p), range(4)):
            case(f"{name}'s stage {s} of {p}, {m} micro-batches, {late} late")
            given = list(schedule(name, p, m).orders[s])
            plain = [tuple(op) for op in given]
            with untouched(order=plain):
                order = read(answer.zb_h1(plain, late), "FIW")
            judge_complete(order, [s], m, "FIW")
            judge_halves(order, given, late)
            expected = split(given, late)
            judge_same(order, expected, "each W right behind the I of the micro-batch `late` later")
    case("a schedule of 4 stages, 6 micro-batches, stage s late by s")
    table = schedule("zb-h1", 4, 6)
    orders = [read(answer.zb_h1([tuple(op) for op in schedule("1f1b", 4, 6).orders[s]], s), "FIW") for s in range(4)]
    judge_clock(orders, table)


def split(order: Sequence[Op], late: int) -> Order:
    """The expected order, said the other way round: each half put at its place."""
    result: Order = []
    last = max(op.micro for op in order)
    for op in order:
        result.append(Op("I", *op[1:]) if op.kind == "B" else op)
        if op.kind == "B" and op.micro >= late:
            result.append(Op("W", op.stage, op.micro - late))
    return result + [Op("W", order[0].stage, k) for k in range(max(0, last + 1 - late), last + 1)]


def judge_halves(order: Order, given: Sequence[Op], late: int) -> None:
    without = [op for op in order if op.kind != "W"]
    moved = [Op("I", *op[1:]) if op.kind == "B" else op for op in given]
    require(without == moved, "without its Ws the order is not the given one with I in place of B",
            f"  given  {words(given)}", f"  yours  {words(without)}")  # fmt: skip
    place = {op: i for i, op in enumerate(order)}
    early = [op for op in order if op.kind == "W" and place[op] < place[Op("I", op.stage, op.micro)]]
    require(not early, f"{word(early[0]) if early else ''} stands before its own I, which it needs")
    micros = [op.micro for op in order if op.kind == "W"]
    require(micros == sorted(micros), f"weight halves run in the order {micros}: that of the micro-batches is asked")


def read(found: object, kinds: str) -> Order:
    """The order as the table's operations. Wrong for what is none."""
    require(isinstance(found, list), f"the result is a {type(found).__name__}, expected a list of operations")
    assert isinstance(found, list)
    for op in found:
        fits = isinstance(op, tuple) and len(op) == 3 and isinstance(op[1], int) and isinstance(op[2], int)
        require(fits, f"{op!r} is no operation: a tuple (kind, stage, micro-batch), such as ('F', 2, 0)")
        require(op[0] in tuple(kinds), f"{op!r}: its kind is none of {', '.join(kinds)}")
    return [Op(*op) for op in found]


def judge_complete(order: Order, stages: Sequence[int], m: int, kinds: str) -> None:
    wanted = Counter(Op(k, s, i) for k in kinds for s in stages for i in range(m))  # type: ignore[arg-type]
    found = Counter(order)
    if strange := [op for op in order if op not in wanted]:
        op = strange[0]
        there = op.micro in range(m)
        raise Wrong(f"{word(op)} is there, and " + (f"stage {op.stage} is not on this rank: it has {list(stages)}"
                    if there else f"the micro-batches are 0 to {m - 1}"))  # fmt: skip
    if twice := [op for op in wanted if found[op] > 1]:
        raise Wrong(f"{word(twice[0])} is there {found[twice[0]]} times: each once")
    if missing := [op for op in wanted if not found[op]]:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise Wrong(f"{word(missing[0])} is missing{more}: every stage and micro-batch has one")


def judge_turns(order: Order, stages: Sequence[int]) -> None:
    """Backward behind its forward; micro-batches of a stage in order."""
    place = {op: i for i, op in enumerate(order)}
    for op in order:
        late = op.kind == "B" and place[op] < place[Op("F", op.stage, op.micro)]
        require(not late, f"{word(op)} stands before its own forward", f"  yours  {words(order)}")
    for kind, stage in itertools.product("FB", stages):
        micros = [op.micro for op in order if op.kind == kind and op.stage == stage]
        back = micros == sorted(micros, reverse=True) and len(micros) > 1
        why = "in reverse, as in a stack: micro-batches are independent, the first comes back first" if back else micros
        what = "backwards" if kind == "B" else "forwards"
        require(micros == sorted(micros), f"{what} of stage {stage} run {why}", f"  yours  {words(order)}")


def judge_alive(order: Order, most: int, all_: int) -> None:
    found = clock.alive(Table("yours", (tuple(order),), ((0,),), 1, (0,)))[0]
    if found <= most:
        return
    where = f"{found} micro-batches are between forward and backward, expected at most {most}"
    if found == all_:
        raise Wrong(f"all forwards come first, as in GPipe: {where}", f"  yours  {words(order)}")
    one = ": after those ahead a forward and then a backward by turns" if found == most + 1 else ""
    raise Wrong(f"too many forwards run ahead: {where}{one}", f"  yours  {words(order)}")


def judge_clock(orders: list[Order], table: Table) -> None:
    """The whole table is played: nobody may wait for ever, nor longer than refimpl's."""
    mine = Table("yours", tuple(map(tuple, orders)), table.paths, table.micro_batches, table.alive)
    try:
        found = clock.bubble(mine)
    except ScheduleError as error:
        raise Wrong("with this table ranks wait for each other for ever", f"  {error}") from error
    expected = clock.bubble(table)
    rows = [f"  rank {r}  {words(order)}" for r, order in enumerate(orders)]
    require(
        found <= expected, f"a rank idles {found:g} ticks, expected {expected:g}: too few forwards run ahead", *rows
    )


def judge_same(found: Order, expected: Sequence[Op], rule: str) -> None:
    if found == list(expected):
        return
    at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    raise Wrong(f"operation {at} is {word(found[at])}, expected {word(expected[at])}: {rule}",
                f"  yours     {words(found)}", f"  expected  {words(expected)}")  # fmt: skip


def word(op: Op) -> str:
    return f"{op.kind} of stage {op.stage}, micro-batch {op.micro}"


def words(order: Sequence[Op], most: int = 24) -> str:
    many = len({op.stage for op in order}) > 1
    shown = [f"{op.kind}{op.micro}" + f"/{op.stage}" * many for op in order]
    return " ".join(shown[:most]) + " ..." * (len(shown) > most)


COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}, {"F": 1.5, "B": 2.75, "I": 2.0, "W": 0.75}


@on_ranks(1)
def test_play(answer: Answer, group: WatchedGroup) -> None:
    for name, (p, m), seconds in itertools.product(NAMES, ((4, 6), (2, 1)), COSTS):
        case(f"{name}, {p} ranks, {m} micro-batches, seconds {seconds}")
        table = schedule(name, p, m)
        cost = Cost(seconds["F"], seconds["I"], seconds["W"])
        judge_played(answer, table.orders, seconds, {op: tuple(span) for op, span in clock.play(table, cost).items()})
    case("one rank has all stages, another has nothing")
    alone = [Op("F", 0, 0), Op("F", 1, 0), Op("B", 1, 0), Op("B", 0, 0)]
    times = [(0.0, 1.0), (1.0, 2.0), (2.0, 4.0), (4.0, 6.0)]
    judge_played(answer, [[], alone], COSTS[0], dict(zip(alone, times, strict=True)))
    case("one rank, 1200 micro-batches, of which forward takes no time")
    long = [Op(kind, 0, k) for k in range(1200) for kind in "FB"]
    spans = {op: (2.0 * op.micro, 2.0 * op.micro + 2.0 * (op.kind == "B")) for op in long}
    judge_played(answer, [long], {"F": 0.0, "B": 2.0}, spans)
    case("no operations at all")
    require(answer.play([[], []], COSTS[0]) == {}, "play([[], []], ...) must be {}")
    for name, orders, stuck in DEADLOCKS:
        case(name)
        judge_stuck(answer, orders, stuck)


# Each: what it is, the orders, and which ranks are not at their end.
DEADLOCKS = (
    ("a backward stands before its forward", [[("F", 0, 0), ("B", 0, 0)], [("B", 1, 0), ("F", 1, 0)]], {0, 1}),
    ("two ranks each wait for what the other computes later",
     [[("F", 0, 0), ("F", 3, 1), ("F", 0, 1)], [("F", 1, 0), ("F", 2, 1), ("F", 1, 1)]], {0, 1}),
    ("nobody computes F of stage 0 for micro-batch 1",
     [[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0), ("B", 1, 0), ("F", 1, 1)], []], {1}),
    ("a W without its I", [[("F", 0, 0), ("B", 0, 0), ("W", 0, 0)]], {0}),
)  # fmt: skip


def judge_played(
    answer: Answer, orders: Sequence[Sequence[Op]], seconds: dict[str, float], expected: dict[Op, tuple[float, ...]]
) -> None:
    plain = [[tuple(op) for op in order] for order in orders]
    seconds = {op.kind: seconds[op.kind] for op in expected}  # of the kinds that there are
    with untouched(orders=plain, seconds=seconds), untouched(**{f"order_{r}": order for r, order in enumerate(plain)}):
        try:
            found = answer.play(plain, seconds)
        except ValueError as error:
            split = "; a backward needs B or I of the next stage, whichever that has" if "I" in seconds else ""
            raise Wrong(
                f"this schedule can be played to its end, and you raise ValueError{split}", f"  {error}"
            ) from error
    require(isinstance(found, dict), f"the result is a {type(found).__name__}, expected a dict")
    missing = [op for op in expected if op not in found]
    require(not missing, f"{word(missing[0]) if missing else ''} is not in the result: every operation is")
    require(len(found) == len(expected), f"{len(found)} operations are in the result, expected {len(expected)}")
    for op in sorted(expected, key=lambda op: expected[op]):  # the first that differs is the cause
        begin, end = found[op]
        if abs(begin - expected[op][0]) > 1e-9:
            raise Wrong(
                f"{word(op)} begins at {begin:g}, expected {expected[op][0]:g}: {cause(op, orders, found, begin)}"
            )
        length = seconds[op.kind]
        require(abs(end - begin - length) < 1e-9, f"{word(op)} takes {end - begin:g} s, expected {length:g}")


def cause(op: Op, orders: Sequence[Sequence[Op]], found: dict[Op, tuple[float, float]], begin: float) -> str:
    """Why an operation may not begin then, or that it could earlier."""
    order = next(order for order in orders if op in order)
    before = list(order)[: list(order).index(op)]
    if before and begin < found[before[-1]][1] - 1e-9:
        return f"its rank still computes {word(before[-1])}"
    stages = 1 + max(other.stage for each in orders for other in each)
    gives = {other.gives: other for each in orders for other in each if other.gives}
    for need in op.needs(stages):
        if begin < found[gives[need]][1] - 1e-9:
            return f"it needs {word(gives[need])}, which has not ended"
    return "its rank is free, and all that it needs is there, so it begins at once"


def judge_stuck(answer: Answer, orders: Sequence[Sequence[tuple[str, int, int]]], stuck: set[int]) -> None:
    try:
        with refused(ValueError, "ranks wait for ever"):
            found = answer.play([list(order) for order in orders], COSTS[0])
    except ValueError as error:
        text = str(error)
        for rank in range(len(orders)):
            named = f"rank {rank}" in text
            require(
                named or rank not in stuck, f"the error does not name rank {rank}, which waits for ever", f"  {text}"
            )
            require(not named or rank in stuck, f"the error names rank {rank}, which is at its end", f"  {text}")
        return
    raise Wrong(f"ranks wait for ever, and there is a result with {len(found)} operations: raise ValueError")
