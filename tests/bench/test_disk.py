"""`refimpl bench disk`: every way moves all the bytes that it is timed for, and a ratio is to the best plain one."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from refimpl.bench.disk import PART, measure
from refimpl.cli.main import app


def test_every_way_has_a_row_and_the_best_plain_one_is_the_measure(tmp_path: Path) -> None:
    ((*rows,),) = measure(tmp_path, 3 * PART, 1)
    for direction in ("read", "write", "both"):
        plain = [row.ratio for row in rows if (row.who, row.direction) == ("plain", direction)]
        assert max(plain) == 1
        assert len(plain) == 6
    (disk,) = [row for row in rows if row.who == "Disk"]
    best = max(row.MB_per_s for row in rows if (row.who, row.direction) == ("plain", "both"))
    assert disk.ratio == pytest.approx(disk.MB_per_s / best)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_refused_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "disk", str(tmp_path / "missing")])
    assert "cannot make a file to offload to" in str(result.exception) + result.output
