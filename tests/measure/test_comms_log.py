"""The log of collectives: bandwidths by their definition, DeepSpeed's averages and layout, what is logged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.measure.comms_log import (
    EXCHANGES,
    GATHERS,
    PLAIN,
    REDUCTIONS,
    CommsLog,
    bandwidths,
    convert_size,
    trim_mean,
)


@given(st.sampled_from([*REDUCTIONS, *EXCHANGES]), st.integers(1, 1 << 40), st.floats(1e-6, 1e5), st.integers(1, 512))
def test_busbw_is_what_a_rank_puts_on_its_link(op: str, size: int, ms: float, ranks: int) -> None:
    rounds = 2 if op in REDUCTIONS else 1
    sent = rounds * (size - size / ranks)  # bytes: its own part stays where it is
    alg, bus = bandwidths(op, size, ms, ranks)
    assert bus == pytest.approx(sent * 8 / (ms / 1e3) / 1e9)
    assert alg == pytest.approx(rounds * size * 8 / (ms / 1e3) / 1e9)


def test_a_gather_is_told_a_part_and_a_message_all_of_it() -> None:
    assert bandwidths("all_gather_into_tensor", 1_000_000, 1.0, 4) == pytest.approx((32.0, 24.0))
    assert all(bandwidths(op, 1_000_000, 2.0, 4) == bandwidths(GATHERS[0], 1_000_000, 2.0, 4) for op in GATHERS)
    assert all(bandwidths(op, 1_000_000, 1.0, 4) == (8.0, 8.0) for op in PLAIN)
    assert bandwidths("barrier", 0, 1.0, 4) == (0, 0)
    with pytest.raises(ValueError, match="'all_mean' is none of all_reduce, "):
        bandwidths("all_mean", 1, 1.0, 2)


def test_sizes_and_averages() -> None:
    sizes = {0: "0B", 1: "1.0 B", 1023: "1023.0 B", 1024: "1.0 KB", 1536: "1.5 KB", 711_831_552: "678.86 MB"}
    assert {size: convert_size(size) for size in sizes} == sizes
    assert convert_size(3 * 1024**8) == "3.0 YB"
    assert convert_size(1024**9) == "1024.0 YB"
    data = [9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 1000.0]
    assert trim_mean(data, 0.1) == sum(sorted(data)[1:-1]) / 8
    assert data[0] == 9.0  # as it was
    assert trim_mean([], 0.1) == 0
    assert trim_mean([3.0], 0.1) == 3.0
    assert trim_mean([0.0, 1.0, 1.0, 1.0, 1.0, 9.0], 0.1) == 1.0  # a tenth of six is one, as in DeepSpeed
    with pytest.raises(ValueError, match="between 0 and 1"):
        trim_mean([1.0], 1.5)


def filled() -> CommsLog:
    log = CommsLog(enabled=True)
    log.append("all_reduce", "all_reduce", 2.0, 1536, 4)
    log.append("all_reduce", "all_reduce", 4.0, 1536, 4)
    log.append("all_reduce", "mine", 1.0, 1 << 20, 4)
    log.append("all_reduce", "all_reduce", 1.0, 4, 4)
    return log


def test_the_table_is_deepspeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert filled().log_all() is None
    heads = [
        "Comm. Op",
        "Message Size",
        "Count",
        "Total Latency(ms)",
        "Avg Latency(ms)",
        "tput_avg (Gbps)",
        "busbw_avg (Gbps)",
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "".join(f"{head:<20}" for head in heads)
    assert [line.split() for line in lines[1:]] == [
        ["all_reduce"],
        ["4.0", "B", "1", "1.00", "1.00", "0.00", "0.00"],
        ["1.5", "KB", "2", "6.00", "3.00", "0.01", "0.01"],
        ["mine"],
        ["1.0", "MB", "1", "1.00", "1.00", "16.78", "12.58"],
    ]
    assert all(len(line) == 7 * 20 for line in lines if line.startswith(" "))


def test_the_stragglers_table_compares_call_by_call(capsys: pytest.CaptureFixture[str]) -> None:
    log = filled()
    other = {"all_reduce": {1536: [1.5, 5.0], 4: [0.25, 0.5]}}  # one more of 4 bytes: not the same calls
    found = log.log_all(show_straggler=True, return_dict=True, everyone=lambda mine: [other, mine])
    assert found is not None
    row = found["straggler_analysis"]["all_reduce"][1536]
    assert (row["total_comm_lat_ms"], row["total_straggler_ms"]) == (1.5 + 4.0, 0.5 + 0.0)
    assert found["straggler_analysis"]["all_reduce"][4]["total_straggler_ms"] == 0
    lines = capsys.readouterr().out.splitlines()
    cut = lines.index("Breakdown with straggler effect")
    assert (lines[cut - 1], lines[cut + 1]) == ("_" * 31, "-" * 31)
    assert lines[cut + 2].split("  ")[0] == "Comm. Op"
    assert lines[cut + 5].split() == ["1.5", "KB", "2", "5.50", "0.50", "2.75", "0.25"]
    assert found["summary"]["mine"][1 << 20]["msg_size_str"] == "1.0 MB"
    assert (found["metadata"]["world_size"], found["metadata"]["rank"]) == (1, 0)


def test_what_is_logged() -> None:
    log = CommsLog()
    assert not log.wants("all_reduce", prof=True)  # off is off
    log.enabled = True
    assert log.wants("all_reduce")
    log.stop_profiling_comms()
    assert not log.wants("all_reduce")
    assert log.wants("all_reduce", prof=True)
    log.start_profiling_op(["gradients", "gradients", "send"])
    assert log.wants("all_reduce", "gradients")
    assert log.prof_ops == ["gradients", "send"]
    log.stop_profiling_op(["gradients"])
    assert not log.wants("all_reduce", "gradients")
    log.start_profiling_comms()
    assert log.wants("broadcast")


def test_each_call_is_printed_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    log = CommsLog(enabled=True, verbose=True)
    log.append("broadcast", "broadcast", 2.0, 1 << 20, 2)
    said = "comm op: broadcast | time (ms): 2.00 | msg size: 1.0 MB | algbw (Gbps): 4.19 | busbw (Gbps): 4.19"
    assert capsys.readouterr().out == f"[Rank 0] {said}\n"
    more = CommsLog()
    more.append("send", "send", 1.0, 8)
    more.append("send", "send", 1.0, 16)
    more.append("send", "send", 2.0, 8)
    log.take(more)
    log.take(more)
    assert (log.get_operation_names(), log.get_total_operations()) == (["broadcast", "send"], 7)
    assert log.get_raw_data()["send"][8][:2] == [4, [1.0, 2.0] * 2]
    assert log.get_operation_summary("gather") is None
    assert log.has_data()
    log.reset_data()
    assert not log.has_data()
