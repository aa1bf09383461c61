"""`refimpl bench disk`: every way moves all the bytes that it is timed for, and a ratio is to the best plain one."""

import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from refimpl.bench.disk import DIRECTIONS, PART, measure, plain
from refimpl.cli.main import app
from refimpl.offload.blocks import BlockFile, Buffer


def test_every_way_has_a_row_and_the_best_plain_one_is_the_measure(tmp_path: Path) -> None:
    ((*rows,),) = measure(tmp_path, 3 * PART, 1)
    for direction in DIRECTIONS:
        plain = [row.ratio for row in rows if (row.who, row.direction) == ("plain", direction)]
        assert max(plain) == 1
        assert len(plain) == 6
    (disk,) = [row for row in rows if row.who == "Disk"]
    best = {d: max(row.MB_per_s for row in rows if (row.who, row.direction) == ("plain", d)) for d in DIRECTIONS}
    assert disk.ratio == pytest.approx(disk.MB_per_s / best["update"])
    assert disk.of_both == pytest.approx(disk.MB_per_s / best["both"])
    assert {row.direction for row in rows if row.of_both is None} == {"read", "write"}
    assert list(tmp_path.iterdir()) == []


def test_what_is_read_is_what_the_turn_before_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a state that rests on a disk too; pages that nobody writes come faster from some disks."""
    file = BlockFile(tmp_path)
    record = file.record(8 << 20)
    moved: list[tuple[str, int]] = []
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, lambda fd, room, at, name=name: moved.append((name, at)))
    run, before = plain(file, record, 1 << 20, 2, "both"), set[int]()
    for turn in range(3):
        moved.clear()
        assert run() == record.nbytes
        read, written = ({at for name, at in moved if name == kind} for kind in ("preadv", "pwritev"))
        assert read | written == set(range(record.offset, record.offset + record.nbytes, 1 << 20))
        assert not turn or read == before
        before = written


def test_an_update_reads_each_block_and_writes_it_back_changed(tmp_path: Path) -> None:
    file = BlockFile(tmp_path)
    record, room = file.record(8 << 20), Buffer(8 << 20)
    room.bytes.view(torch.int64).copy_(torch.arange(1 << 20))
    file.write(record, room).wait()
    assert plain(file, record, 1 << 20, 3, "update")() == 2 * record.nbytes
    file.forget()  # whoever wrote it kept no sums
    file.read(record, room).wait()
    assert torch.equal(room.bytes.view(torch.int64), torch.arange(1 << 20) + 1)


def test_a_folder_that_cannot_be_is_refused_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "disk", str(tmp_path / "missing")])
    assert "cannot make a file to offload to" in str(result.exception) + result.output
