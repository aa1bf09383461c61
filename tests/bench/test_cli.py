"""The command line: lists after an option, counts such as 25M, the table, and the report's shape."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from refimpl.bench.cli import app
from refimpl.bench.options import Bench, count, spread
from refimpl.bench.overhead import GATHERED
from refimpl.bench.publish import publish


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("--ranks 2 4 --json x", "--ranks 2 --ranks 4 --json x"),
        ("--ranks 2 --ranks 4", "--ranks 2 --ranks 4"),
        ("--ranks=2 --params 1M 2M 3M", "--ranks=2 --params 1M --params 2M --params 3M"),
        ("--ranks", "--ranks"),
    ],
)
def test_lists(typed: str, read: str) -> None:
    assert spread(typed.split()) == read.split()


def test_counts() -> None:
    assert [count(text) for text in ("25M", "1.5k", "1B", "64")] == [25_000_000, 1500, 10**9, 64]
    for bad in ("", "M", "ten", "0", "-1M", "inf", "nan"):
        with pytest.raises(typer.BadParameter):
            count(bad)


@pytest.mark.parametrize("bench", ["offload", "checkpoint"])
@pytest.mark.parametrize(("folder", "says"), [("no/such", "No such file"), ("FILE", "Not a directory")])
def test_a_folder_that_cannot_be_used(
    bench: str, folder: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("mine")
    result = CliRunner().invoke(app, [bench, "--folder", folder], standalone_mode=False)
    assert isinstance(result.exception, typer.BadParameter)
    assert f"--folder {folder}: cannot write there: {says}" in str(result.exception)


def test_a_file_is_tried_also_where_typer_has_not_made_a_path_of_it() -> None:
    """As up to typer 0.28: a context has the words as they were typed, only the function gets a path."""
    with pytest.raises(typer.BadParameter, match="--json no/such: cannot write there: No such file"):
        Bench("zero").invoke(SimpleNamespace(params={"file": "no/such"}))


def test_zero_writes_a_table_and_a_report(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    options = "--params 50K --stages 0 --dtype bf16 fp32 --context 16 --turns 1 --steps 1 --ranks 2 3 --json"
    result = CliRunner().invoke(app, ["zero", *options.split(), str(file)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "refimpl DDP" in result.output
    report = json.loads(file.read_text())
    assert {"torch", "cores"} <= report["environment"].keys()
    ours = [(row["dtype"], row["ranks"]) for row in report["rows"] if row["implementation"] == "refimpl DDP"]
    assert sorted(ours) == [("bf16", 2)] * 2 + [("bf16", 3)] * 2 + [("fp32", 2)] * 2 + [("fp32", 3)] * 2  # two pages
    columns = {"implementation", "stage", "ranks", "parameters", "dtype", "pages", "step_ms", "exposed_ms"}
    columns |= {"ratio_same_pages", "ratio_any_pages"}
    assert all(row.keys() == columns for row in report["rows"])
    assert max(len(line) for line in result.output.splitlines()) <= 80
    printed = CliRunner().invoke(app, ["table", str(file)], catch_exceptions=False)
    assert printed.exit_code == 0
    assert printed.output.count("| DDP |") == 4


def test_overhead_writes_a_table_and_a_report(tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    options = "--ranks 2 --stages 3 --units 3 --turns 1 --steps 1 --top 4 --json"
    result = CliRunner().invoke(app, ["overhead", *options.split(), str(file)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["gathered"] for row in rows] == [name for name in GATHERED for _ in range(4 + 6)]
    assert all(row["parameters"] == 30 for row in rows)


def test_parallel_writes_a_table_and_a_report(tmp_path: Path) -> None:
    file = tmp_path / "parallel.json"
    options = "--axis tensor context --kind plain ring --width 32 --layers 4 --context 8 --sequence 16"
    options += " --turns 1 --steps 1 --ranks 2 --json"
    result = CliRunner().invoke(app, ["parallel", *options.split(), str(file)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert max(len(line) for line in result.output.splitlines()) <= 80
    rows = json.loads(file.read_text())["rows"]
    assert [(row["axis"], row["kind"]) for row in rows] == [("tensor", "plain")] * 4 + [("context", "ring")] * 4
    assert {row["implementation"] for row in rows} == {"refimpl", "torch"}


def test_comm_writes_a_table_and_a_report(tmp_path: Path) -> None:
    file = tmp_path / "comm.json"
    options = "--sizes 1K 4K --turns 1 --steps 1 --ranks 2 --json"
    result = CliRunner().invoke(app, ["comm", *options.split(), str(file)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert {(row["collective"], row["bytes"]) for row in rows} == {
        (collective, size)
        for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
        for size in (1000, 4000)
    }
    assert all(
        row.keys()
        == {"implementation", "collective", "ranks", "bytes", "pages", "ms", "ratio_same_pages", "ratio_any_pages"}
        for row in rows
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("zero --ranks 1", "--ranks"),
        ("zero --params many", "many"),
        ("zero --stages 4", "--stages"),
        ("zero --dtype fp8", "fp8"),
        ("comm 3", "3"),
        ("parallel --axis expert", "expert"),
        ("parallel --axis tensor --kind 1f1b", "1f1b"),
        ("parallel --axis pipeline --kind gpipe --layers 3 --ranks 2", "3 layers do not make 2 equal stages"),
        ("compression --width 130", "--width: width 130 does not divide into 4 heads"),
        ("compression --hooks --method sign", "--hooks has methods of its own, and no link"),
        ("one-bit --width 130", "--width: width 130 does not divide into 4 heads"),
        ("compression --plot pyproject.toml/x.png", "--plot pyproject.toml/x.png: cannot write there"),
        ("overlap --picture pyproject.toml/x.png", "--picture pyproject.toml/x.png: cannot write there"),
        ("overlap --trace tests", "--trace tests: cannot write there"),
        ("table pyproject.toml", "pyproject.toml"),
        ("moe --ranks 9999 --size 8,8,8,9999,1", "--ranks"),
        ("sparse --tokens 99999999999999999999", "99999999999999999999"),
        ("sparse --tokens 1B", "GB at once are more than this machine's memory"),
    ],
)
def test_bad_input(options: str, words: str) -> None:
    result = CliRunner().invoke(app, options.split())
    assert result.exit_code == 2
    assert words in result.output


def test_what_is_wrong_with_the_last_pattern_is_said_before_the_first_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("refimpl.bench.sparse.heat", lambda *_: pytest.fail("measured first"))
    result = CliRunner().invoke(app, ["sparse", "--tokens", "256", "100"])
    assert result.exit_code == 2
    assert "sequence length 100 is not a multiple of the block size 64" in result.output


def test_a_report_holds_no_nan(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Row:
        who: str
        ms: float

    file = tmp_path / "report.json"
    publish("A race", ("who",), [[Row("nobody", float("nan")), Row("all", math.inf)]], file)
    rows = json.loads(file.read_text(), parse_constant=pytest.fail)["rows"]
    assert rows == [{"who": "nobody", "ms": None}, {"who": "all", "ms": None}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("one-bit --ranks 1 --optimizer AdamW --steps 1 --width 8 --layers 1 --context 8 --json", "| - |"),
        ("overlap --bucket 20K --width 8 --layers 1 --context 8 --turns 1 --json", "best bucket size"),
        ("overlap --bucket 20K --width 8 --layers 1 --context 8 --turns 1 --trace", "best bucket size"),
    ],
)
def test_a_full_disk_is_one_line_and_the_tables_stay(options: str, shown: str) -> None:
    result = CliRunner().invoke(app, [*options.split(), "/dev/full"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.output
    assert result.stderr == "/dev/full: cannot be written: No space left on device; what is printed above is all\n"
    assert shown in result.stdout
