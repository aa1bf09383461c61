"""Every table of every size is what it states; tables with a mistake are refused; torch's own tables are the same."""

import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from refimpl.parallel.pipeline import clock
from refimpl.parallel.pipeline.clock import ScheduleError
from refimpl.parallel.pipeline.messages import Recv, Send, programs
from refimpl.parallel.pipeline.picture import text
from refimpl.parallel.pipeline.schedules.named import NAMES, schedule
from refimpl.parallel.pipeline.schedules.table import Cost, Op, Table, Value, count_off, whole
from refimpl.parallel.pipeline.verify import run_synchronously, verify
from refimpl.plan.time import bubble as bubble_share

RANKS, MICRO = range(1, 9), range(1, 17)
COSTS = [Cost(), Cost(3, 2, 2), Cost(2, 3, 1)]


def sizes(name: str) -> list[tuple[int, int, int | None]]:
    """(ranks, micro-batches, chunks) of the tables that there are."""
    ranks = [p for p in RANKS if name != "dualpipe" or p % 2 == 0]
    chunks: list[int | None] = [1, 2, 3, 4] if name == "interleaved" else [None]
    return [(p, m, v) for p in ranks for m in MICRO for v in chunks if p * (v or 1) <= 16]


@pytest.mark.parametrize("name", NAMES)
def test_every_size_keeps_what_it_states(name: str) -> None:
    for p, m, v in sizes(name):
        verify(schedule(name, p, m, v), COSTS if m == 16 else COSTS[:1])


@pytest.mark.parametrize("name", NAMES)
def test_a_formula_is_stated_where_the_pattern_fits_and_the_bound_is_reached(name: str) -> None:
    for p in (2, 4, 8):
        table = schedule(name, p, 2 * p)
        assert table.bubble(Cost()) is not None
        assert clock.alive(table) == list(table.alive)


def test_1f1b_and_gpipe_have_the_bubble_of_the_plan() -> None:
    for p in RANKS:
        for m in MICRO:
            for name in ("gpipe", "1f1b"):
                assert clock.share(schedule(name, p, m)) == pytest.approx(bubble_share(p, m))


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe", "dualpipe-v", "interleaved"])
def test_the_others_idle_less_than_1f1b_in_the_same_time(name: str) -> None:
    """A schedule with two chunks a rank has chunks of half the cost."""
    for p in range(2, 9, 2):
        table = schedule(name, p, 2 * p)
        half = Cost(*(x / 2 for x in Cost()[:3])) if table.paths[0] != tuple(range(p)) else Cost()
        assert clock.bubble(table, half) < clock.bubble(schedule("1f1b", p, 2 * p))


def test_zb_h1_is_a_third_of_1f1b_and_zb_v_is_zero() -> None:
    for p in range(2, 9):
        assert clock.bubble(schedule("zb-h1", p, 2 * p)) * 3 == clock.bubble(schedule("1f1b", p, 2 * p))
        assert clock.bubble(schedule("zb-v", p, 2 * p)) == 0


@pytest.mark.parametrize("p", [2, 4, 8])
def test_the_papers_tables(p: int) -> None:
    """arXiv:2401.10241 (1F1B, ZB-H1), arXiv:2405.15362 (V-ZB) and arXiv:2412.19437 (DualPipe's activations).
    DualPipeV's, PP + 1 of a rank's two chunks for PP = 2p stages, are of github.com/deepseek-ai/DualPipe.

    Bubble, and activations in whole micro-batches, when F, B and W take equally long.
    """
    f = b = w = 1
    rows = {
        "1f1b": ((p - 1) * (f + b + w), p),
        "zb-h1": ((p - 1) * (f + b - w), p),
        "zb-v": (0, p),
        "dualpipe": (None, p + 1),
        "dualpipe-v": (None, (2 * p + 1) / 2),
    }
    for name, (bubble, activations) in rows.items():
        table = schedule(name, p, 3 * p)
        halves = 2 if len(table.paths[0]) == 2 * p else 1  # chunks of a rank on the way of one micro-batch
        assert max(clock.alive(table)) / halves == activations
        assert bubble is None or clock.bubble(table) == bubble


@pytest.mark.parametrize("cost", [Cost(), Cost(2, 3, 1), Cost(2, 3, 2), Cost(3, 3, 2)])
def test_dualpipes_pairs_have_the_papers_bubble(cost: Cost) -> None:
    f, i, w, _ = cost
    for p in (2, 4, 6, 8):
        for m in (2 * p, 3 * p + 1):
            both_ways = schedule("dualpipe", p, 2 * (m // 2))
            folded = schedule("dualpipe-v", p // 2, m)  # of as many stages
            for table in (both_ways, folded):
                assert clock.bubble(table, cost, pairs=True) == (p / 2 - 1) * ((f + i + w) + (i + w) - 3 * w)


def test_dualpipe_v_with_whole_backwards_idles_longer_than_interleaved_1f1b() -> None:
    """Of chunks of one length. Split it idles p - 1."""
    for p in (2, 3, 4, 8):
        for m in (2 * p, 3 * p):
            assert clock.bubble(schedule("dualpipe-v", p, m)) == p - 1
            assert clock.bubble(whole(schedule("dualpipe-v", p, m))) == 4 * (p - 1) - 1
            assert clock.bubble(schedule("interleaved", p, p * (m // p), 2)) == 3 * (p - 1)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe", "dualpipe-v"])
def test_any_table_is_right_without_split_backwards(name: str) -> None:
    for p, m, _ in (size for size in sizes(name) if size[0] <= 4):
        table = whole(schedule(name, p, m))
        verify(table)
        assert not table.splits


def test_leaving_micro_batches_out_never_takes_longer() -> None:
    """So the tables of sizes that have no formula are bounded by the next that has one."""
    for name in ("interleaved", "dualpipe", "dualpipe-v", "zb-v"):
        for p in (2, 4):
            ends = [max(span.end for span in clock.play(schedule(name, p, m)).values()) for m in MICRO]
            assert ends == sorted(ends)


def test_messages_that_take_time_cost_1f1b_two_a_stage_on_its_way() -> None:
    """Filling sends p-1 activations, draining p-1 gradients; in between they hide behind work if there is enough."""
    late = clock.bubble(schedule("gpipe", 4, 8), Cost(message=0.25))
    assert late == clock.bubble(schedule("gpipe", 4, 8)) + 2 * 3 * 0.25
    for name in ("1f1b", "interleaved", "zb-v", "dualpipe-v"):
        assert clock.bubble(schedule(name, 1, 4), Cost(message=0.25)) == 0, "what a rank made itself is no message"


# --- what is wrong is found


def broken(table: Table, change: Callable[[list[list[Op]]], None]) -> Table:
    orders = [list(order) for order in table.orders]
    change(orders)
    return replace(table, orders=tuple(map(tuple, orders)))


def swap(rank: int, a: int, b: int) -> Callable[[list[list[Op]]], None]:
    def change(orders: list[list[Op]]) -> None:
        orders[rank][a], orders[rank][b] = orders[rank][b], orders[rank][a]

    return change


def move(orders: list[list[Op]]) -> None:
    orders[1].append(orders[0].pop())


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("1f1b", lambda orders: orders[0].pop(), "stage 0, micro-batch 3: F 1 times, B 0"),
        ("1f1b", lambda orders: orders[1].append(orders[1][0]), "F 2 times"),
        ("1f1b", move, "rank 1 computes B of stage 0, micro-batch 3, which lies on another rank"),
        ("1f1b", lambda orders: orders[0].append(Op("F", 0, 9)), "there is no such"),
        ("1f1b", swap(1, 0, 1), "rank 1 waits to compute B of stage 1, micro-batch 0"),
        ("zb-h1", swap(0, 2, 3), "ranks wait for each other"),
        ("zb-h1", lambda orders: orders[1].remove(Op("W", 1, 0)), "I 1, W 0"),
        ("gpipe", lambda orders: orders[1].sort(key=lambda op: (op.micro, op.kind == "B")), None),
    ],
)
def test_a_table_with_a_mistake_is_refused(name: str, change: Callable[[list[list[Op]]], None], says: str) -> None:
    table = schedule(name, 2, 4)
    if says is None:
        verify(broken(table, change))  # 1F1B on the last rank: another order, as right
    else:
        with pytest.raises(ScheduleError, match=re.escape(says)):
            verify(broken(table, change))


def test_a_broken_promise_is_noticed() -> None:
    gpipe = schedule("gpipe", 4, 8)
    with pytest.raises(ScheduleError, match="rank 0 keeps 8 activations alive, 4 are stated"):
        verify(replace(gpipe, alive=(4,) * 4))
    with pytest.raises(ScheduleError, match=r"the bubble is 9 for .*, the formula says 8"):
        verify(replace(gpipe, bubble=lambda cost: 8))


def test_two_ranks_that_both_send_first_are_a_deadlock() -> None:
    """The classic of 1F1B's steady state: one sends activations, the other gradients, and both wait to be received."""
    table = schedule("1f1b", 2, 2)
    lists = [list(program) for program in programs(table)]
    run_synchronously(table, [tuple(lines) for lines in lists])
    forward, backward = Value("forward", 0, 1), Value("backward", 1, 0)
    for lines, mine, other in ((lists[0], forward, backward), (lists[1], backward, forward)):
        sent = next(line for line in lines if isinstance(line, Send) and line.value == mine)
        got = next(line for line in lines if isinstance(line, Recv) and line.value == other)
        lines.remove(got)
        lines.insert(lines.index(sent) + 1, got)
    with pytest.raises(ScheduleError, match="nobody goes on") as stopped:
        run_synchronously(table, [tuple(lines) for lines in lists])
    assert "rank 0: to send forward of stage 0, micro-batch 1 to rank 1" in str(stopped.value)
    assert "rank 1: to send backward of stage 1, micro-batch 0 to rank 0" in str(stopped.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_value_crosses_each_boundary_once(name: str) -> None:
    table = schedule(name, 4, 8)
    lists = programs(table)
    sent = [line.value for program in lists for line in program if isinstance(line, Send)]
    assert sorted(sent) == sorted(line.value for program in lists for line in program if isinstance(line, Recv))
    inside = sum(a == b for a, b in zip(table.paths[0], table.paths[0][1:], strict=False))  # the turn of a V
    assert len(sent) == len(set(sent)) == 2 * 8 * (table.stages - 1 - inside)


@pytest.mark.parametrize("call", [("1f1b", 0, 4), ("gpipe", 2, 0), ("interleaved", 2, 4, 0)])
def test_sizes_that_no_table_has(call: tuple[str, int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        schedule(*call)


def test_names_and_chunks_are_checked() -> None:
    with pytest.raises(ValueError, match="'2f2b' is none of gpipe, 1f1b"):
        schedule("2f2b", 2, 4)
    with pytest.raises(ValueError, match="'1f1b' has 1 stage a rank, not 2: try 'interleaved'"):
        schedule("1f1b", 2, 4, 2)
    with pytest.raises(ValueError, match="3 ranks: the two directions"):
        schedule("dualpipe", 3, 4)
    assert count_off(["F0", "F0", "B1", "W1"], (3, 5)) == [
        Op("F", 3, 0), Op("F", 3, 1), Op("B", 5, 0), Op("W", 5, 1),
    ]  # fmt: skip


# --- the docstrings' drawings, and torch


@pytest.mark.parametrize(
    "module", ["gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zero_bubble_v", "dualpipe", "dualpipe_v"]
)
def test_the_drawing_in_the_docstring_is_the_table(module: str) -> None:
    source = import_module(f"refimpl.parallel.pipeline.schedules.{module}")
    assert source.__doc__
    ((sizes, drawing),) = re.findall(rf"(?m)^    {module}\((.*)\)\n((?:    rank .*\n)+)", source.__doc__)
    table = getattr(source, module)(*map(int, sizes.split(", ")))
    assert drawing == "".join(f"    {line}\n" for line in text(table).splitlines())


def of_torch(cls: str, ranks: int, micro: int, chunks: int) -> list[list[tuple[str, int, int]]]:
    """The computations of one of torch's schedules, in order, without making its stages."""
    made = object.__new__(getattr(torch_schedules, cls))
    made.pp_group_size, made.n_local_stages, made._n_microbatches = ranks, chunks, micro
    made._num_stages = made.num_stages = ranks * chunks
    made._stages = [SimpleNamespace(group_size=ranks)]
    made.number_of_rounds = max(1, micro // ranks)
    made.microbatches_per_round = micro // made.number_of_rounds
    if chunks == 1 and cls != "ScheduleInterleavedZeroBubble":
        orders = made._get_pipeline_order()
    else:
        orders = {rank: made._calculate_single_rank_operations(rank) for rank in range(ranks)}
    flat = [[a for op in orders[r] if op for a in (op.sub_actions or (op,))] for r in range(ranks)]
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    return [
        [(kinds[a.computation_type.name], a.stage_index, a.microbatch_index) for a in order
         if a.computation_type.name in kinds] for order in flat
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "cls", "chunks"),
    [
        ("gpipe", "ScheduleGPipe", 1),
        ("1f1b", "Schedule1F1B", 1),
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 3),
        ("zb-h1", "ScheduleInterleavedZeroBubble", 1),
        ("zb-v", "ScheduleZBVZeroBubble", 2),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_torch_has_the_same_orders(name: str, cls: str, chunks: int, ranks: int) -> None:
    for micro in (ranks, 2 * ranks, 3 * ranks):
        table = schedule(name, ranks, micro, chunks if name == "interleaved" else None)
        theirs = of_torch(cls, ranks, micro, chunks)
        if cls == "Schedule1F1B":  # its drawing numbers the last rank's forwards from 1 (torch 2.13; its run does not)
            off = min(k for kind, _, k in theirs[-1] if kind == "F")
            theirs[-1] = [(kind, s, k - off * (kind == "F")) for kind, s, k in theirs[-1]]
        assert [[tuple(op) for op in order] for order in table.orders] == theirs


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_torchs_dualpipe_v_is_ours_folded(ranks: int) -> None:
    """Its rank r is our rank r of twice as many; its second chunk what comes from the other direction."""
    for micro in (2 * ranks, 3 * ranks + 1):
        ours = schedule("dualpipe", 2 * ranks, 2 * micro).orders[:ranks]
        theirs = of_torch("ScheduleDualPipeV", ranks, micro, 2)
        folded = [
            [(op.kind, op.stage if op.micro % 2 == 0 else 2 * ranks - 1 - r, op.micro // 2) for op in order]
            for r, order in enumerate(ours)
        ]
        assert folded == theirs == [[*map(tuple, order)] for order in schedule("dualpipe-v", ranks, micro).orders]
