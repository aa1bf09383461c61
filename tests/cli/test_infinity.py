"""`refimpl demo --infinity` in miniature: without memory one clear line, with a disk the bytes of the formula."""

import json
from pathlib import Path

import pytest
from worlds import run

from refimpl.cli import infinity
from refimpl.cli.infinity import WAYS, Lived, in_one_line, live, tried
from refimpl.model.gpt import GPTConfig

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
