"""Who left first, told from those who only waited for it."""

import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from refimpl.comm.agree import who_left
from refimpl.ranks import register
from refimpl.ranks.register import Register


def leaves(directory: Path, me: int) -> None:
    """Rank 1 is killed; ranks 2 and 3 wait in vain for the one before, and leave."""
    mine = Register(directory, 4, me)
    mine.enter()
    if me > 1:
        who_left(mine)
        mine.leave()
    os._exit(0)


@pytest.fixture(autouse=True)
def nobody_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "SOON", 0)


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="macOS has os.waitid from Python 3.13 on")
def test_the_first_that_ended_is_told_from_those_that_waited_for_it(tmp_path: Path) -> None:
    mine = Register(tmp_path, 4, 0)
    mine.enter()
    assert mine.left() == ([], [])
    fork = multiprocessing.get_context("fork")
    for rank in (1, 2, 3):
        process = fork.Process(target=leaves, args=(tmp_path, rank))
        process.start()
        os.waitid(os.P_PID, process.pid or 0, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
        if rank == 1:
            assert mine.left() == ([1], [])
            assert mine.gone([0, 1])
            assert not mine.gone([0, 2, 3])  # which are not there yet
    shutil.rmtree(tmp_path)  # as the rank does that made it, when it leaves
    assert mine.left() == ([1], [2, 3])
    assert who_left(mine).startswith("rank 1 left (it returned, raised or was killed)")
    assert who_left(mine).endswith("; ranks 2, 3 waited in vain before this one")


def test_who_leaves_says_so_before_it_has_ended_and_a_new_group_begins_anew(tmp_path: Path) -> None:
    mine, other = Register(tmp_path, 2, 0), Register(tmp_path, 2, 1)
    mine.enter()
    other.enter()
    assert "another rank left" in who_left(mine)
    assert other.left() == ([], [0])
    mine.enter()
    assert other.left() == ([], [])
    assert not other.gone([0, 1])
    mine.leave()
    assert other.left() == ([0], [])
    assert other.gone([0, 1])
    assert Register.of_job() is None


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux lists what is open")
def test_whoever_asks_who_has_ended_leaves_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert register.ended({0: os.getpid(), 1: os.getppid()}, 0) == []
    assert len(os.listdir("/proc/self/fd")) == before
