"""`refimpl demo --infinity` in miniature: without memory one clear line, with a disk the bytes of the formula."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner
from worlds import run

from refimpl.cli import infinity
from refimpl.cli.infinity import WAYS, Lived, in_one_line, live, tried
from refimpl.cli.main import app
from refimpl.model.gpt import GPTConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="--infinity needs Linux")

DISK = "ZeRO-3, all on disk"
SMALL = GPTConfig(width=64, layers=2, heads=2, context=64)


def lived(way: str, folder: Path, steps: int) -> Lived:
    """Runs on every rank: `live` with a small model and room for it."""
    infinity.MODEL = SMALL  # type: ignore[misc]
    return live(way, folder, 1 << 33, steps)


def test_a_step_over_a_disk_moves_44_bytes_of_each_parameter_that_a_rank_owns(tmp_path: Path) -> None:
    """AdamW: 12 read and written, a gradient 4 and 4; the weights 4 read for forward and for backward, and written."""
    ranks = 2
    found = run(lived, DISK, tmp_path, 2, ranks=ranks)[0]
    owned, units = SMALL.parameters / ranks, 2 + 2 * 6  # modules with parameters of their own
    assert 44 * owned <= found.moved <= 44 * owned + 44 * units * 64 + 11 * units * 4096  # padding, whole pages
    assert 20 * owned <= found.on_disk <= 20 * owned + 20 * units * 64 + 3 * units * 4096
    for away in ("parameters", "gradients", "master weights"):
        assert found.memory.get(away, 0) == 0
    assert found.died_of == ""


@pytest.mark.parametrize("way", WAYS)
def test_without_memory_a_way_dies_in_one_line(way: str, tmp_path: Path) -> None:
    said = tried(way, 2, tmp_path, 4 << 20, 1).died_of
    assert said.startswith("dies: ")
    assert "\n" not in said


def test_another_failure_is_not_taken_for_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="a typo"):
        in_one_line("rank 0 raised NameError: a typo")
    assert in_one_line("rank 1 died: MemoryError").startswith("dies: ")


def test_the_report_and_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command, with ways that are only told."""

    def told(way: str, ranks: int, folder: Path, limit: int, steps: int) -> Lived:
        if way != DISK:
            return Lived(way, died_of="dies: told")
        n = infinity.MODEL.parameters
        return Lived(way, "", 5.0, {"gradients": 2 * n}, 8 * n, 18 * n, 1.0)

    monkeypatch.setattr(infinity, "tried", told)
    monkeypatch.setattr(infinity, "DISK_BYTES", 1)
    assert infinity.run(2, 3, tmp_path / "disk", tmp_path / "out") == 0
    assert [one["died_of"] for one in json.loads((tmp_path / "out" / "report.json").read_text())["ways"]] == [
        *["dies: told"] * 3,
        "",
    ]
    assert (tmp_path / "out" / "infinity.png").stat().st_size > 10_000
    monkeypatch.setattr(infinity, "tried", lambda way, *_: Lived(way, died_of="dies: told"))
    assert infinity.run(2, 3, tmp_path / "disk", tmp_path / "out") == 1


REFUSED = {
    "--ranks 0": "--ranks 0: at least 1 rank is needed",
    "--ranks -1": "--ranks -1: at least 1 rank is needed",
    "--ranks 100000": "--ranks 100000: 100000 on this machine need about",
    "--steps 3": "--steps: --infinity trains its own model; it takes --ranks, --folder and --out alone",
    "--strategy zero1": "--strategy: --infinity trains its own model",
    "--width 64": "--width: --infinity trains its own model",
    "--folder FILE": "FILE: it is a file, and a folder is needed",
    "--folder FILE/x": "FILE/x: cannot write there: Not a directory; choose another folder",
    "--out FILE": "--out FILE: it is a file, and a folder is needed",
    "--out LOOP": "--out LOOP: cannot write there: ",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_what_cannot_be_done_is_said_in_one_line_before_anything_starts(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("mine")
    Path("LOOP").symlink_to("LOOP")
    result = CliRunner().invoke(app, ["demo", "--infinity", *typed.split()])
    assert result.exit_code == 2
    assert REFUSED[typed] in result.stderr
    assert result.stderr.count("\n") == 1
    assert Path("FILE").read_text() == "mine"


def test_a_folder_on_a_disk_is_for_infinity_alone() -> None:
    result = CliRunner().invoke(app, ["demo", "--folder", "here"])
    assert result.exit_code == 2
    assert "--folder here: only --infinity uses a disk; add it, or leave --folder out" in result.stderr


def test_a_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free._replace(free=5 * 10**6))
    result = CliRunner().invoke(app, ["demo", "--infinity", "--folder", "here"])
    assert result.exit_code == 2
    assert "--folder here: 1,1" in result.stderr
    assert "5 MB are free: free some, or name a folder on another disk" in result.stderr
