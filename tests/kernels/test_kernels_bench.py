"""`refimpl bench kernels`: every way gives eager's result, rates follow from times, and the report holds it all."""

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from refimpl.bench import kernels
from refimpl.bench.cli import app
from refimpl.kernels import language
from refimpl.kernels.case import Case, cases


@pytest.fixture(autouse=True)
def _as_on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever tests/kernels/conftest.py has set in this process: a CPU takes torch's operators."""
    monkeypatch.setattr(language, "INTERPRETED", False)


def test_a_report_of_one_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TURNS", 1)
    monkeypatch.setattr(kernels, "SECONDS", 0.0)
    monkeypatch.setattr(
        kernels.torch, "compile", lambda function, dynamic: function
    )  # a minute of a busy core, or more
    file = tmp_path / "kernels.json"
    done = CliRunner().invoke(app, ["kernels", "--only", "softmax", "--json", str(file)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = json.loads(file.read_text())["rows"]
    copy, product = rows[:2]
    (case,) = (case for case in cases(small=True) if case.operation == "softmax")
    there = [name for name, (call, _) in kernels.ways(case, torch.device("cpu"), in_time=True).items() if call]
    runs = [row for row in rows[2:] if row["step"]]  # one of no step says that there is no C++ compiler
    assert {(row["step"], row["way"]) for row in runs} == {(s, way) for s in ("forward", "backward") for way in there}
    for row in runs:
        assert row["case"] == case.name
        moved = case.moved if row["step"] == "forward" else case.moved_backward
        assert math.isclose(row["tb_s"], moved / row["ms"] / 1e9)
        assert math.isclose(row["of_limit"], row["tb_s"] / copy["tb_s"])
        assert row["off"] < 1e-5
        eager = next(r for r in runs if (r["step"], r["way"]) == (row["step"], "eager"))
        assert math.isclose(row["beside_eager"], row["ms"] / eager["ms"])
    assert product["tflop_s"] > 0


def test_what_is_not_there_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    case = Case("twice fp32 3", twice, twice, lambda device: (torch.ones(3, device=device),), 24, flops=3)
    cpu = torch.device("cpu")
    assert kernels.ways(case, cpu, in_time=False)["compile"] == (None, "no time was left")
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    assert kernels.ways(case, cpu, in_time=True)["compile"] == (None, "no C++ compiler")
    rows = list(kernels.heat(case, cpu, kernels.Limits(1e9, 1e9), 0.0))
    assert [row.way for row in rows] == ["ours", "eager", "compile"]
    assert rows[0].of_limit == pytest.approx(3 / 1e9 / rows[0].ms * 1e3)


def test_a_peer_that_raises_is_listed_with_its_error() -> None:
    def once(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    case = Case("once fp32 3", once, once, lambda device: (torch.ones(3, device=device),), 24, peers={"theirs": broken})
    rows = list(kernels.heat(case, torch.device("cpu"), kernels.Limits(1e9, 1e9), 0.0))
    assert [(row.way, row.note) for row in rows if row.ms is None] == [
        ("theirs", "ZeroDivisionError"),
        ("compile", "no time was left"),
    ]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_peer_that_takes_too_long_is_left_behind(monkeypatch: pytest.MonkeyPatch, wrapped: bool) -> None:
    def once(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def never(x: torch.Tensor) -> torch.Tensor:
        try:
            while True:
                x = x + 1
        except TimeoutError as error:
            if wrapped:  # as inductor does
                raise KeyError("a compiler's") from error
            raise

    monkeypatch.setattr(kernels, "PATIENCE", 0.2)
    case = Case("once fp32 3", once, once, lambda device: (torch.ones(3, device=device),), 24, peers={"theirs": never})
    rows = list(kernels.heat(case, torch.device("cpu"), kernels.Limits(1e9, 1e9), 0.0))
    assert next((row.way, row.note) for row in rows if row.ms is None) == ("theirs", "not there after 0.2 s")


def test_a_word_that_names_nothing_is_refused() -> None:
    done = CliRunner().invoke(app, ["kernels", "--only", "sotfmax"])
    assert done.exit_code == 2
    assert "no kernel's case has 'sotfmax'" in done.output


def test_every_kernel_of_this_room_has_a_case_for_a_cpu() -> None:
    assert {case.operation for case in cases()} == {case.operation for case in cases(small=True)}
