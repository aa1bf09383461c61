"""The program of `make gpu-check`, on a CPU: every part in miniature, and a report whatever happens."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from stream_log import Recorder, Watch, races

from refimpl.comm.work import Steps
from refimpl.gpu import races as hunt
from refimpl.gpu.check import PARTS, TOTAL, check, main
from refimpl.gpu.part import Part
from refimpl.gpu.report import Report, Result
from refimpl.gpu.timeline import length, merged
from refimpl.gpu.twins import Twins
from refimpl.gpu.workload import STAGES, Workload, differing

CPU = torch.device("cpu")
SMALL = Workload(width=64, layers=1, steps=2)


@pytest.mark.parametrize("name", [part for part in PARTS if part != "suite"])
def test_every_part_runs_in_miniature(name: str) -> None:
    part: Part = importlib.import_module(f"refimpl.gpu.{name}")
    findings = list(part.run(CPU, 300))
    assert findings
    assert [f for f in findings if f.passed is False] == []
    assert json.loads(json.dumps([f.value for f in findings])) is not None


def test_the_parts_fit_into_nine_minutes() -> None:
    assert sum(PARTS.values()) <= TOTAL < 540


def test_a_part_that_fails_hangs_or_has_no_time_leaves_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import refimpl.gpu.check as module

    monkeypatch.setattr(module, "MINIATURE", 0.01)
    report = check("cpu", tmp_path, ["races"])
    monkeypatch.setattr(module, "MINIATURE", 60)
    report.results += check("nonsense", tmp_path, ["machine"]).results
    report.results += check("cuda", tmp_path, ["steady"], total=1).results
    assert [r.ended for r in report.results] == ["not done after 0 s", "exit code 1", "no time was left"]
    report.write(tmp_path)
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["passed"] is False
    assert [part["verdict"] for part in data["parts"]] == [r.verdict for r in report.results]
    assert "RuntimeError" in "".join(data["parts"][1]["log"])
    text = (tmp_path / "report.md").read_text()
    assert "| steady | FAILED (no time was left) | 0.0 |" in text
    assert "says nothing about GPUs" in text


def test_what_a_part_found_before_its_time_was_over_is_kept(tmp_path: Path) -> None:
    lines = [{"name": "a", "value": 1.0, "passed": True}, {"name": "b", "value": {"x": [1]}, "passed": False}]
    report = Report("cuda", [Result("races", 3.0, "", lines, [])], {"date": "2026-01-01"})
    assert "- ok: a: 1\n- **FAILED**: b: x 1\n" in report.markdown()
    assert report.results[0].verdict == "FAILED (1 of 2 checks)"
    assert not report.passed


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU")
def test_without_a_gpu_it_says_so_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "gpu")]) == 2
    assert "torch finds no GPU here, so nothing was checked" in capsys.readouterr().err
    assert not (tmp_path / "gpu").exists()


@pytest.mark.parametrize("stage", STAGES)
def test_the_twins_themselves_do_not_race(stage: str) -> None:
    recorder = Recorder()
    with Watch(recorder):
        hunt.trained(stage, SMALL, CPU, recorder, lambda: None)
    assert races(recorder.log) == []


@pytest.mark.parametrize("stage", STAGES)
def test_what_arrives_too_late_shows_in_the_bits(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last reduction, as whoever does not wait for it would find it: not there yet."""
    truth, _ = hunt.trained(stage, SMALL, CPU, hunt.Streams(), lambda: None)
    op = "all_reduce" if stage == "ddp" else "reduce_scatter"
    original, calls = getattr(Twins, op), []

    def late(twins: Twins, x: torch.Tensor, *more: object) -> Steps:
        calls.append(op)
        if len(calls) == 3:
            x.fill_(float("nan"))
            yield from ()
        else:
            yield from original(twins, x, *more)

    monkeypatch.setattr(Twins, op, late)
    found, _ = hunt.trained(stage, SMALL, CPU, hunt.Streams(), lambda: None)
    assert len(calls) > 3
    assert differing(truth, found) != []


def test_times_side_by_side_are_counted_once() -> None:
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert length([(0, 4), (5, 6)]) == 5
