"""A rank's file: what is written is read, nobody finds it, and a disk that cannot is named at once."""

import errno
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from refimpl.checkpoint.errors import CheckpointError, naming
from refimpl.offload import blocks
from refimpl.offload.blocks import Aio, BlockFile, Buffer, OffloadError, OffloadWarning, Record, Transfer
from refimpl.offload.homes import Disk
from refimpl.offload.shelf import Shelf


@pytest.mark.parametrize("aio", [Aio(), Aio(block_size=5000, queue_depth=3), Aio(4096, 1)])
@pytest.mark.parametrize("nbytes", [1, 4096, 100_000])
def test_what_is_written_is_read(aio: Aio, nbytes: int, tmp_path: Path) -> None:
    file = BlockFile(tmp_path, aio)
    records = [file.record(nbytes) for _ in range(3)]
    buffers = [Buffer(nbytes) for _ in records]
    for i, buffer in enumerate(buffers):
        buffer.bytes.copy_(torch.arange(len(buffer.bytes)).add(7 * i).to(torch.uint8))
    for way in [file.write(record, buffer) for record, buffer in zip(records, buffers, strict=True)]:
        way.wait()
    for record, buffer in zip(records, buffers, strict=True):
        back = Buffer(nbytes)
        file.read(record, back).wait()
        assert torch.equal(back.bytes, buffer.bytes)
    assert file.written_bytes == file.read_bytes == sum(record.nbytes for record in records) == file.end


def test_when_an_error_comes_nothing_moves_any_more() -> None:
    failed, moved = threading.Event(), list[int]()

    def fail() -> None:
        failed.set()
        raise MemoryError

    def move() -> None:
        failed.wait()
        moved.append(1)

    with ThreadPoolExecutor(2) as pool:
        way = Transfer([(pool.submit(fail), lambda: None), (pool.submit(move), lambda: None)])
        with pytest.raises(MemoryError):
            way.wait()
        assert moved
        way.wait()  # it has been said


def test_the_page_cache_is_passed_by_where_that_can_be(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    probe.touch()
    try:
        os.close(os.open(probe, os.O_RDWR | getattr(os, "O_DIRECT", 0)))
        can = hasattr(os, "O_DIRECT")
    except OSError:
        can = False
    assert BlockFile(tmp_path).direct is can if can else True


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
def test_a_file_system_without_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(blocks.os, "open", refusing)
    with pytest.warns(OffloadWarning, match="no O_DIRECT"):
        file = BlockFile(tmp_path)
    record, buffer = file.record(100), Buffer(100)
    file.write(record, buffer).wait()
    file.read(record, buffer).wait()
    assert not file.direct


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="this system has no O_TMPFILE")
def test_a_file_system_that_can_do_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No files without a name, no space taken beforehand: as ext3 and NFS before 4.2 answer."""
    real = os.open

    def refusing(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *args)

    def cannot(*args: Any) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(blocks.os, "open", refusing)
    monkeypatch.setattr(blocks.os, "posix_fallocate", cannot)
    file = BlockFile(tmp_path)
    record = file.record((1 << 20) + 5000)
    assert not list(tmp_path.iterdir())
    assert os.fstat(file.descriptor).st_blocks * 512 >= record.nbytes
    buffer = Buffer(record.nbytes)
    file.write(record, buffer).wait()
    file.read(record, buffer).wait()


def test_nobody_finds_the_file(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.file.record(1 << 20)
    assert list(tmp_path.iterdir()) == []
    os.rmdir(tmp_path)  # a folder that vanishes takes nothing with it
    shelf = Shelf(disk, torch.arange(100.0), 64)
    assert torch.equal(shelf.read(torch.empty(100)), torch.arange(100.0))


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, time; from refimpl.offload.blocks import BlockFile; f = BlockFile(sys.argv[1]);"
        "f.record(50 << 20); print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if sys.platform == "linux":
        held = [path.stat() for path in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert any(s.st_nlink == 0 and 512 * s.st_blocks >= 50 << 20 for s in held), "a file without a name"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_or_not_ours_is_named(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=r"missing: cannot make a file to offload to: No such file.*nvme_path"):
        BlockFile(tmp_path / "missing")
    with pytest.raises(OffloadError, match=r"/proc: cannot make a file to offload to"):
        BlockFile(Path("/proc"))


def test_a_full_disk_says_so_before_anything_is_written(tmp_path: Path) -> None:
    file = BlockFile(tmp_path)
    free = os.fstatvfs(file.descriptor)
    with pytest.raises(OffloadError, match=r"no room for .* more bytes to offload .* free"):
        file.record(2 * free.f_blocks * free.f_frsize)
    assert file.end == 0


def test_a_block_that_is_not_what_was_written_is_named(tmp_path: Path) -> None:
    file = BlockFile(tmp_path, Aio(block_size=4096))
    record, buffer = file.record(3 * 4096), Buffer(3 * 4096)
    buffer.bytes.fill_(3)
    file.write(record, buffer).wait()
    other = Buffer(4096)
    os.pwritev(file.descriptor, [other.view], 4096)
    with pytest.raises(
        OffloadError, match="bytes 4,096 to 8,192 of the offloaded state are not what was written there"
    ):
        file.read(record, buffer).wait()
    os.ftruncate(file.descriptor, 2 * 4096)
    with pytest.raises(OffloadError, match="bytes 8,192 to 12,288"):
        file.read(Record(2 * 4096, 4096), buffer).wait()
    file.forget()  # all of it is about to be replaced: what is there is as good as anything
    file.read(record, buffer).wait()


def test_what_somebody_else_has_changed_is_seen_behind_writes_of_its_own_too(tmp_path: Path) -> None:
    file = BlockFile(tmp_path, Aio(block_size=4096))
    record, buffer = file.record(3 * 4096), Buffer(3 * 4096)
    file.write(record, buffer).wait()
    assert not file.was_touched()
    os.utime(file.descriptor, (0, 0))
    file.write(record, buffer).wait()
    assert file.was_touched()
    file.trust()
    assert not file.was_touched()
    with file._change():  # of two blocks that are written at once, one has left its date when the other begins
        os.utime(file.descriptor, (1, 1))
        file._write_block(record.offset, buffer.view[:4096])
    assert not file.was_touched()


def test_a_shelf_is_written_run_by_run_and_read_whole(tmp_path: Path) -> None:
    disk = Disk(tmp_path, buffer_count=2)
    values = torch.arange(300.0).to(torch.bfloat16)
    shelf = Shelf(disk, values, 128)
    shelf.write(128, torch.full((128,), -1.0).to(torch.bfloat16))
    shelf.write(256, torch.full((44,), -2.0).to(torch.bfloat16))
    values[128:256], values[256:] = -1, -2
    assert torch.equal(shelf.read(torch.empty(300, dtype=torch.bfloat16)), values)


def test_a_shelf_is_written_behind_the_callers_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs are handed over while the disk has not finished the first; a reader waits for them."""
    disk, gate, real = Disk(tmp_path), threading.Event(), os.pwritev
    shelf = Shelf(disk, torch.zeros(256), 128)
    disk.arrived()

    def slow(*args: Any) -> int:
        assert gate.wait(60)
        return real(*args)

    monkeypatch.setattr(blocks.os, "pwritev", slow)
    values = torch.arange(256.0)
    shelf.write(0, values[:128])
    shelf.write(128, values[128:])
    gate.set()
    assert torch.equal(shelf.read(torch.empty(256)), values)


def test_what_is_read_ahead_takes_a_buffer_each_until_it_is_used(tmp_path: Path) -> None:
    disk = Disk(tmp_path, buffer_count=2)
    shelves = [Shelf(disk, torch.full((100,), float(i)), 64) for i in range(4)]
    for shelf in shelves:
        shelf.begin()
    assert [shelf.is_begun for shelf in shelves] == [True, True, False, False]
    for i, shelf in enumerate(shelves):
        assert torch.equal(shelf.read(torch.empty(100)), torch.full((100,), float(i)))
    assert len(disk.ahead) == 2
    shelves[0].begin()
    shelves[0].drop()
    assert len(disk.ahead) == 2


def test_a_shard_larger_than_a_buffer_may_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="8,192 bytes are brought from the disk at a time, and a buffer holds 4,096"):
        Shelf(Disk(tmp_path, buffer_size=4096), torch.zeros(2048), 4096)


def test_a_save_that_cannot_read_what_is_offloaded_names_that_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the disk of the checkpoint, with its remedy."""
    file = BlockFile(tmp_path)
    record, buffer = file.record(100), Buffer(100)
    file.write(record, buffer).wait()

    def fails(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(blocks.os, "preadv", fails)
    match = rf"^saved: {tmp_path}: cannot read: Input/output error; go on from"
    with pytest.raises(CheckpointError, match=match), naming(Path("saved")):
        file.read(record, buffer).wait()
