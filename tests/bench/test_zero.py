"""The comparison compares like with like: every contestant of every stage computes the same losses."""

import pytest
import worlds

from refimpl.bench.race import Turns
from refimpl.bench.zero import SAME_LOSS, Lap, Workload, check_same_work, heat, measure, rank_rows

TINY = Workload(parameters=50_000, context=16, turns=Turns(turns=2, steps=2))


def test_all_stages_and_peers_reach_the_same_loss() -> None:
    """One oracle for all: plain DDP's losses at stage 0, rank by rank and step by step."""
    oracle = [lap.losses["torch DDP"] for lap in worlds.run(heat, 0, TINY, ranks=3)]
    for stage in range(4):
        laps = worlds.run(heat, stage, TINY, ranks=3)
        for lap, expected in zip(laps, oracle, strict=True):
            assert len(lap.losses) >= 2
            for losses in lap.losses.values():
                assert losses == pytest.approx(expected, rel=SAME_LOSS)
                assert losses[-1] < losses[0]
    assert oracle[0] != oracle[1]  # each rank has a batch of its own


@pytest.mark.parametrize("found", [2.01, float("nan")])
def test_another_loss_is_no_comparison(found: float) -> None:
    good = Lap({}, {"ours": [3.0, 2.0], "peer": [3.0, 2.0]})
    bad = Lap({}, {"ours": [3.0, 2.0], "peer": [3.0, found]})
    check_same_work([good, good])
    with pytest.raises(ValueError, match=r"rank 1, step 1: the loss is 2.0 with ours and .* with peer"):
        check_same_work([good, bad])


def test_rows_of_a_run() -> None:
    heats = list(measure([2], [TINY], stages=[0, 3]))
    assert [[row.implementation for row in rows if "DeepSpeed" not in row.implementation] for rows in heats] == [
        ["refimpl DDP", "refimpl DDP (THP)", "torch DDP", "torch DDP (THP)"],
        ["refimpl Zero3", "refimpl Zero3 (THP)", "torch FSDP2 stage 3", "torch FSDP2 stage 3 (THP)"],
    ]
    for stage, rows in zip([0, 3], heats, strict=True):
        best = min(row.step_ms for row in rows if not row.implementation.startswith("refimpl"))
        for row in rows:
            assert (row.stage, row.ranks, row.parameters) == (stage, 2, TINY.gpt.parameters)
            assert row.ratio_to_best_peer == pytest.approx(row.step_ms / best)


def test_ratio_is_of_medians_to_the_best_peer_of_both_worlds() -> None:
    times = {
        "refimpl Zero2": [30.0, 10.0, 20.0],
        "torch FSDP2 stage 2": [50.0],
        "torch FSDP2 stage 2 (THP)": [40.0],
    }
    rows = rank_rows(times, stage=2, ranks=4, parameters=7)
    assert [(row.step_ms, row.ratio_to_best_peer) for row in rows] == [(20.0, 0.5), (50.0, 1.25), (40.0, 1.0)]


@pytest.mark.parametrize("wanted", [10_000_000, 25_000_000, 100_000_000])
def test_model_has_about_the_parameters_asked_for(wanted: int) -> None:
    gpt = Workload(wanted).gpt
    assert gpt.parameters == pytest.approx(wanted, rel=0.06)
    assert gpt.width % 64 == 0
