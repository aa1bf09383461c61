"""`refimpl bench overlap` in miniature: what is counted, the picture, the trace. No time is judged."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from refimpl.bench import overlap
from refimpl.bench.cli import app
from refimpl.bench.overlap import Lap, Workload, best, predict, rows
from refimpl.bench.overlap_picture import draw
from refimpl.bench.race import Turns

WORKLOAD = Workload(width=16, layers=1, context=8, turns=Turns(turns=2, steps=1, warm_up=1))
LINK = "1Gbit/s 1ms"
SIZES = (500, 1_000_000)


@pytest.fixture(scope="module")
def laps() -> list[Lap]:
    return overlap.race(2, SIZES, WORKLOAD, LINK)


def test_every_bucket_is_on_the_timeline_and_in_the_model(laps: list[Lap]) -> None:
    for lap in laps:
        assert sorted(name for names in lap.buckets[500] for name in names) == sorted(lap.sizes)
        assert set(lap.computing.full) == set(lap.sizes)
        assert len(lap.buckets[1_000_000]) == 1
        for size, steps in lap.steps.items():
            assert len(steps) == 2
            for one in steps:
                reductions = [f for f in one.flights if f.tag == "gradients"]
                assert len(reductions) == len(lap.buckets[size])
                assert [span.name for span in one.phases] == ["forward", "backward", "update"]
                assert all(f.span.ms >= 2 for f in reductions)  # a bucket's two halves take 1 ms each: the link's sleep
                assert 0 < one.exposed_ms <= one.step.ms
        assert predict(lap, 500).seconds >= lap.computing.backward
    heat = rows(laps, LINK)
    assert [row.buckets for row in heat] == [len(laps[0].buckets[size]) for size in SIZES]
    assert all(0 <= row.hidden <= 1 and row.exposed_ms <= row.step_ms for row in heat)
    assert best(heat)["costs"] >= 1


@pytest.mark.parametrize("width", [1, 130, 200])
def test_a_model_of_any_width_has_heads(width: int) -> None:
    model = Workload(width=width, layers=1, context=2).model()
    assert model(*Workload(context=2).batch(0)).isfinite()


def test_the_picture_is_drawn(laps: list[Lap], tmp_path: Path) -> None:
    draw(rows(laps, LINK), laps, tmp_path / "new" / "overlap.png")
    assert (tmp_path / "new" / "overlap.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command(laps: list[Lap], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "race", lambda *_: laps)
    trace, report = tmp_path / "trace.json", tmp_path / "report.json"
    done = CliRunner().invoke(
        app, ["overlap", "--ranks", "2", "--bucket", "500", "1M", "--trace", str(trace), "--json", str(report)]
    )
    assert done.exit_code == 0, done.output
    assert "best bucket size: measured" in done.output
    assert {row["pid"] for row in json.loads(trace.read_text())["traceEvents"]} == {0, 1}
    assert [row["bucket_size"] for row in json.loads(report.read_text())["rows"]] == list(SIZES)


def test_a_link_that_is_none_is_refused() -> None:
    done = CliRunner().invoke(app, ["overlap", "--link", "fast"])
    assert done.exit_code == 2
    assert "is no link" in " ".join(done.output.split())
