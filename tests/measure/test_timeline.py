"""A step's timeline from its ledger: what is hidden, what is exposed, in phases; and the trace of it."""

import itertools
import json

import pytest

from refimpl.measure import ledger as module
from refimpl.measure.ledger import Ledger
from refimpl.measure.timeline import Flight, Span, Timeline, chrome_trace, overlap, phase, timelines, union

MS = 1_000_000


class Hand:
    """A clock that stands where it is put."""

    def __init__(self) -> None:
        self.now = 0

    def perf_counter_ns(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(module, "time", hand)
    return hand


def recorded(clock: Hand, keep: int = 1000) -> Ledger:
    """Forward 0 to 10, backward 10 to 30, update 30 to 35 ms; two reductions in flight, the host held 5 ms."""
    ledger = Ledger(keep)

    def at(ms: float) -> None:
        clock.now = int(ms * MS)

    at(0)
    before = ledger.start("all_reduce", 8, "start")
    ledger.end(before, held=[(0, 0)])
    with phase(ledger, "step"):
        with phase(ledger, "forward"):
            at(10)
        with phase(ledger, "backward"):
            at(15)
            first = ledger.start("all_reduce", 100, "gradients")
            at(20)
            second = ledger.start("all_reduce", 200, "gradients")
            at(28)
            ledger.end(first, held=[(25 * MS, 28 * MS)])
            at(30)
            ledger.end(second, held=[(27 * MS, 30 * MS)])
        with phase(ledger, "update"):
            at(35)
    at(40)
    ledger.mark("begin step")  # of which there is no end yet
    return ledger


def test_what_is_exposed_and_what_is_hidden(clock: Hand) -> None:
    (one,) = timelines(recorded(clock))
    assert one.step == Span("step", 0, 35 * MS)
    assert [span.name for span in one.phases] == ["forward", "backward", "update"]
    assert [(f.span.name, f.span.ms, f.tag, f.sent_bytes) for f in one.flights][1:] == [
        ("all_reduce 1", 13.0, "gradients", 100),
        ("all_reduce 2", 10.0, "gradients", 200),
    ]
    assert one.exposed_ms == 5.0  # 25 to 30, told twice in part
    assert one.hidden_ms == 15.0 - 5.0  # under way from 15 to 30
    assert (one.phase_ms("forward"), one.phase_ms("backward"), one.phase_ms("update")) == (10.0, 15.0, 5.0)
    assert [len(lane) for lane in one.lanes()] == [2, 1]
    with pytest.raises(ValueError, match=r"no phase 'optimizer'; there are \['backward', 'forward', 'update'\]"):
        one.phase_ms("optimizer")


def test_the_trace_has_a_row_for_each_kind(clock: Hand) -> None:
    (one,) = timelines(recorded(clock))
    trace = json.loads(json.dumps(chrome_trace({0: one, 3: one})))
    rows = [row for row in trace["traceEvents"] if row["pid"] == 3]
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert names == {0: "computing", 1: "exposed", 2: "collectives 0", 3: "collectives 1"}
    spans = {row["name"]: row for row in rows if row["ph"] == "X"}
    assert (spans["backward"]["ts"], spans["backward"]["dur"], spans["backward"]["tid"]) == (10_000, 20_000, 0)
    assert spans["all_reduce 2"]["args"] == {"tag": "gradients", "sent_bytes": 200}
    assert sum(row["dur"] for row in rows if row.get("tid") == 1 and row["ph"] == "X") == 5000


def test_a_ledger_forgets_and_so_does_the_timeline(clock: Hand) -> None:
    ledger = recorded(clock)
    ledger.reset()
    assert timelines(ledger) == []
    assert ledger.held == []
    assert Timeline(Span("step", 0, MS), [], [], []).hidden_ms == 0
    one_by_one = [Flight(Span("send", i * MS, (i + 1) * MS), "", 1) for i in range(3)]
    assert [len(lane) for lane in Timeline(Span("step", 0, MS), [], one_by_one, []).lanes()] == [3]
    with pytest.raises(ZeroDivisionError), phase(ledger, "step"):
        _ = 1 // 0
    assert timelines(ledger) == []


def test_what_is_still_under_way_when_a_step_ends_is_cut_there(clock: Hand) -> None:
    ledger = Ledger()
    with phase(ledger, "step"):
        late = ledger.start("all_gather", 1)
        clock.now = 5
    clock.now = 9
    ledger.end(late)
    (one,) = timelines(ledger)
    assert [flight.span.end for flight in one.flights] == [one.step.end]


def test_unions_and_overlaps_of_intervals_are_those_of_their_points() -> None:
    edges = list(itertools.combinations(range(6), 2))
    for these in itertools.combinations(edges, 2):
        spans = [Span("a", *edge) for edge in these]
        points = {p for begin, end in these for p in range(begin, end)}
        merged = union(spans)
        assert {p for s in merged for p in range(s.begin, s.end)} == points
        assert sum(s.end - s.begin for s in merged) == len(points)
        for edge in edges:
            both = overlap(merged, [Span("b", *edge)])
            assert sum(s.end - s.begin for s in both) == len(points & set(range(*edge)))
