"""The folder of a job's ranks goes with them, and if all are killed, with the next job."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from refimpl import launch
from refimpl.ranks import folder


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed_with_a_folder(tmp: Path) -> Path:
    """What a process that made one has left."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(folder.make()[0]).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as said:
        return Path(said.read())


def test_what_killed_jobs_left_is_cleared_and_what_is_held_is_not(tmp: Path) -> None:
    left = killed_with_a_folder(tmp)
    (left / "register").write_text("x")
    foreign = tmp / "refimpl-mine"
    foreign.mkdir()
    kept, handle = folder.make()
    assert set(tmp.iterdir()) == {foreign, kept}
    other, its_handle = folder.make()
    assert set(tmp.iterdir()) == {foreign, kept, other}
    os.close(handle)
    folder.clear()
    assert set(tmp.iterdir()) == {foreign, other}
    os.close(its_handle)


SERVED = "from refimpl.ranks import server; server.PRELOAD.clear(); server.start_server('string'); {}"


@pytest.mark.parametrize("end", ["import os; os.kill(os.getpid(), 9)", "pass"])
def test_the_servers_socket_goes_too(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as short:  # where a socket can have a name
        monkeypatch.setattr(tempfile, "tempdir", short)
        subprocess.run([sys.executable, "-c", SERVED.format(end)], env=os.environ | {"TMPDIR": short})
        assert len(os.listdir(short)) == (end != "pass")
        folder.clear()
        assert os.listdir(short) == []


def test_one_that_was_cleared_before_it_was_held_is_not_used(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold, made = folder.hold, []

    def late(new: Path) -> int:
        made.append(new)
        if len(made) == 1:
            folder.clear()  # another job, before this one holds what it has made
        return hold(new)

    monkeypatch.setattr(folder, "hold", late)
    new, handle = folder.make()
    assert made[0] != new == made[1]
    assert list(tmp.iterdir()) == [new]
    os.close(handle)


def test_a_file_for_which_there_is_no_room_is_named(tmp: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match=r"too large; 101 bytes are needed: make room, raise `ulimit -f`.*/board"):
            folder.mapped(tmp / "board", 101)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system takes no space ahead")
def test_its_space_is_taken_with_it(tmp: Path) -> None:
    """Or a full disk is heard of where a rank writes into the memory: it is killed, by SIGBUS."""
    memory = folder.mapped(tmp / "board", 100_000)
    assert (tmp / "board").stat().st_blocks * 512 >= len(memory) == 100_000


def test_a_rank_holds_it_too(tmp: Path) -> None:
    with launch.World(2) as world:
        world._let_go()  # as if the caller's process were gone
        folder.clear()
        assert world.setup.directory.is_dir()
        assert len(set(world.call(os.getpid))) == 2
    assert not world.setup.directory.exists()
