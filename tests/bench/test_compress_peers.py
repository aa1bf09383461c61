"""The race of compressed gradients beside torch's hooks runs: what it finds depends on the machine."""

import json
from pathlib import Path

from typer.testing import CliRunner

from refimpl.bench.cli import app
from refimpl.bench.compress_peers import PAIRS


def test_every_pair_is_raced(tmp_path: Path) -> None:
    small = ["--width", "64", "--layers", "1", "--context", "8", "--batch", "1", "--turns", "1"]
    result = CliRunner().invoke(app, ["compression", "--hooks", *small, "--json", str(tmp_path / "a.json")])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["wire"] for row in rows] == list(PAIRS)
    assert all(row["ratio"] == row["ours_ms"] / row["torch_ms"] > 0 for row in rows)
