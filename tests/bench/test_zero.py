"""The comparison compares like with like: every contestant of every stage computes the same losses."""

import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import worlds

from refimpl.bench.peers import ALONE, implementations, text_of
from refimpl.bench.race import Turns
from refimpl.bench.zero import SAME_LOSS, Lap, Workload, check_same_work, heat, measure, rank_rows
from refimpl.comm.group import Group

TINY = Workload(parameters=50_000, context=16, turns=Turns(turns=2, steps=2))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_all_stages_and_peers_reach_the_same_loss(dtype: str) -> None:
    """One oracle for all: plain DDP's losses at stage 0, rank by rank and step by step."""
    workload = replace(TINY, dtype=dtype)
    oracle = [lap.losses["torch DDP"] for lap in worlds.run(heat, 0, workload, ranks=3)]
    for stage in range(4):
        laps = worlds.run(heat, stage, workload, ranks=3)
        for lap, expected in zip(laps, oracle, strict=True):
            assert len(lap.losses) >= 3
            for name, losses in lap.losses.items():
                assert losses[-1] < losses[0]
                if name != ALONE:
                    assert losses == pytest.approx(expected, rel=SAME_LOSS[dtype])
            # Compute alone: the same model and batch, and nothing heard from other ranks.
            assert lap.losses[ALONE][0] == pytest.approx(expected[0], rel=SAME_LOSS[dtype])
            assert lap.losses[ALONE] != pytest.approx(expected, rel=SAME_LOSS["fp32"])
    assert oracle[0] != oracle[1]  # each rank has a batch of its own


@pytest.mark.parametrize("found", [2.01, float("nan")])
def test_another_loss_is_no_comparison(found: float) -> None:
    good = Lap({}, {"ours": [3.0, 2.0], "peer": [3.0, 2.0], ALONE: [3.0, 1.0]})
    bad = Lap({}, {"ours": [3.0, 2.0], "peer": [3.0, found]})
    check_same_work([good, good])
    with pytest.raises(ValueError, match=r"rank 1, step 1: the loss is 2.0 with ours and .* with peer"):
        check_same_work([good, bad])
    other_batch = Lap({}, {"ours": [3.0, 2.0], ALONE: [2.9, 2.0]})
    with pytest.raises(ValueError, match=r"rank 0, step 0: .* with compute alone"):
        check_same_work([other_batch])


def test_rows_of_a_run() -> None:
    heats = list(measure([2], [TINY], stages=[0, 3]))
    contestants = [["refimpl DDP", "torch DDP", ALONE], ["refimpl Zero3", "torch FSDP2 stage 3", ALONE]]
    for stage, names, rows in zip([0, 3], contestants, heats, strict=True):
        rows = [row for row in rows if "DeepSpeed" not in row.implementation]
        assert [(row.implementation, row.pages) for row in rows] == [(n, p) for n in names for p in ("plain", "huge")]
        for row in rows:
            assert (row.stage, row.ranks, row.parameters, row.dtype) == (stage, 2, TINY.gpt.parameters, "fp32")


def test_ratios_are_of_medians_to_the_best_peer_and_exposed_is_beyond_compute_alone() -> None:
    times = {
        "plain": {"refimpl Zero2": [30.0, 10.0, 20.0], "torch FSDP2 stage 2": [50.0], ALONE: [15.0]},
        "huge": {"refimpl Zero2": [36.0], "torch FSDP2 stage 2": [40.0], ALONE: [16.0]},
    }
    rows = rank_rows(times, stage=2, ranks=4, workload=TINY)
    found = {(row.implementation, row.pages): row for row in rows}
    assert len(found) == len(rows) == 6
    ours = found["refimpl Zero2", "plain"]
    assert (ours.step_ms, ours.exposed_ms, ours.ratio_same_pages, ours.ratio_any_pages) == (20.0, 5.0, 0.4, 0.5)
    huge = found["refimpl Zero2", "huge"]
    assert (huge.exposed_ms, huge.ratio_same_pages, huge.ratio_any_pages) == (20.0, 0.9, 0.9)
    assert found["torch FSDP2 stage 2", "plain"].ratio_any_pages == 1.25
    assert found[ALONE, "plain"].exposed_ms == 0.0  # and it is no peer: the ratios above are to FSDP2


@pytest.mark.parametrize("wanted", [10_000_000, 25_000_000, 100_000_000])
def test_model_has_about_the_parameters_asked_for(wanted: int) -> None:
    gpt = Workload(wanted).gpt
    assert gpt.parameters == pytest.approx(wanted, rel=0.06)
    assert gpt.width % 64 == 0


def test_an_installed_deepspeed_races_unless_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `make gpu-check` leaves it out: one that does not fit this torch is no failure of ours."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin="deepspeed/__init__.py"))
    asked, left_out = ([one.name for one in implementations(2, wanted)] for wanted in (True, False))
    assert [name for name in asked if name not in left_out] == ["DeepSpeed stage 2"]


def test_a_text_lies_where_its_rank_computes() -> None:
    text = text_of(Group(None, device=torch.device("meta")), batch=2, context=5)
    assert text.device.type == "meta"
    assert text.shape == (2, 6)
