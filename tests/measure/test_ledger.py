"""The ledger by itself: sums, order, and the trace (its bytes are tested against the wire in tests/comm)."""

import json

import pytest

from refimpl.measure.ledger import Ledger


def three_calls() -> Ledger:
    ledger = Ledger()
    first = ledger.start("all_gather", 100, "forward")
    second = ledger.start("reduce_scatter", 30, "backward")
    ledger.mark("grad w")
    ledger.end(second)
    third = ledger.start("all_gather", 7, "backward")
    ledger.end(third)
    ledger.end(first)
    return ledger


def test_bytes_and_calls_by_collective_and_by_tag() -> None:
    ledger = three_calls()
    assert ledger.sent_bytes() == {"all_gather": 107, "reduce_scatter": 30}
    assert ledger.sent_bytes("tag") == {"forward": 100, "backward": 37}
    assert ledger.calls() == {"all_gather": 2, "reduce_scatter": 1}
    assert ledger.calls("tag") == {"forward": 1, "backward": 2}


def test_events_keep_their_order_and_each_end_names_its_start() -> None:
    events = three_calls().events
    assert [(e.phase, e.op, e.call) for e in events] == [
        ("start", "all_gather", 0),
        ("start", "reduce_scatter", 1),
        ("mark", "grad w", -1),
        ("end", "reduce_scatter", 1),
        ("start", "all_gather", 2),
        ("end", "all_gather", 2),
        ("end", "all_gather", 0),
    ]
    times = [e.time_ns for e in events]
    assert times == sorted(times)


def test_open_calls_are_those_that_started_and_did_not_end() -> None:
    ledger = Ledger()
    ledger.end(ledger.start("broadcast", 1))
    ledger.start("all_reduce", 2, "loss")
    assert [(e.op, e.tag) for e in ledger.open_calls()] == [("all_reduce", "loss")]


def test_a_call_ends_once_and_only_if_it_began() -> None:
    ledger = Ledger()
    call = ledger.start("send", 1)
    ledger.end(call)
    with pytest.raises(KeyError):
        ledger.end(call)
    with pytest.raises(KeyError):
        ledger.end(99)


def test_reset_forgets_events_but_a_call_under_way_still_ends() -> None:
    ledger = Ledger()
    call = ledger.start("send", 5)
    ledger.reset()
    assert ledger.events == []
    assert ledger.sent_bytes() == {}
    ledger.end(call)
    assert [e.phase for e in ledger.events] == ["end"]
    assert ledger.start("send", 5) != call


def test_table_has_a_row_for_each_collective_and_tag_and_the_same_sums() -> None:
    table = three_calls().table()
    assert table.to_dict("records") == [
        {"collective": "all_gather", "tag": "forward", "calls": 1, "sent_bytes": 100},
        {"collective": "reduce_scatter", "tag": "backward", "calls": 1, "sent_bytes": 30},
        {"collective": "all_gather", "tag": "backward", "calls": 1, "sent_bytes": 7},
    ]
    assert list(Ledger().table().columns) == ["collective", "tag", "calls", "sent_bytes"]


def test_chrome_trace_is_json_with_one_lane_a_call() -> None:
    ledger = three_calls()
    ledger.start("all_reduce", 1)  # never ends: a beginning without an end
    rows = json.loads(json.dumps(ledger.chrome_trace(rank=3)))["traceEvents"]
    assert {row["pid"] for row in rows} == {3}
    begun = {row["id"]: row for row in rows if row["ph"] == "b"}
    ended = {row["id"]: row for row in rows if row["ph"] == "e"}
    assert set(begun) - set(ended) == {3}
    assert all(ended[i]["ts"] >= begun[i]["ts"] for i in ended)
    assert [row["name"] for row in rows if row["ph"] == "i"] == ["grad w"]
    assert begun[0]["args"] == {"tag": "forward", "sent_bytes": 100}


def test_a_long_run_keeps_the_last_events_and_the_sums_of_all() -> None:
    ledger = Ledger(keep=16)
    for step in range(1000):
        ledger.end(ledger.start("send" if step % 2 else "all_gather", step, "even" if step % 2 == 0 else "odd"))
        ledger.mark(f"step {step}")
        assert len(ledger.events) <= 18
    assert [e.op for e in ledger.events[-3:]] == ["send", "send", "step 999"]
    assert len(ledger.events) >= 16
    assert ledger.calls() == {"all_gather": 500, "send": 500}
    assert ledger.sent_bytes("tag") == {"even": sum(range(0, 1000, 2)), "odd": sum(range(1, 1000, 2))}
    assert ledger.table()["sent_bytes"].sum() == sum(range(1000))
    ledger.reset()
    assert ledger.calls() == ledger.sent_bytes() == {}
    assert ledger.table().empty


def test_of_the_times_on_a_device_the_last_are_kept() -> None:
    ledger = Ledger(keep=2, timed=True)
    for begun in range(5):
        ledger.end(ledger.start("send", 1), begun, begun + 1, held=[(begun, begun)])
    assert ledger.device_ms(lambda begun, done: done - begun) == {3: 1, 4: 1}
    assert ledger.held == [(3, 3), (4, 4)]
    assert ledger.crossed_bytes() == {}
    ledger.cross("send", 2)
    ledger.cross("send", 3)
    assert ledger.crossed_bytes() == {"send": 5}
    ledger.reset()
    assert (ledger.device_ms(lambda begun, done: 0), ledger.held) == ({}, [])


def test_by_default_a_hundred_thousand_events_are_kept() -> None:
    ledger = Ledger()
    for _ in range(120_000):
        ledger.mark("step")
    assert 100_000 <= len(ledger.events) <= 112_500


def test_a_ledger_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="keep must be at least 1 event, not 0"):
        Ledger(keep=0)
