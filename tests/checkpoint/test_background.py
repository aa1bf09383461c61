"""A save that goes on while training does: the same files, of that moment; its failures reach the trainer."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import worlds
from saving import in_folder, same, settings, start, train, weights

from refimpl.checkpoint import atomic, write
from refimpl.checkpoint.background import Background
from refimpl.checkpoint.errors import CheckpointError
from refimpl.checkpoint.write import SCRIPTS
from refimpl.engine import checkpoint

DECOUPLED = {"checkpoint": {"writer": {"type": "python", "decoupled": True}}}


def held_up(folder: Path, stage: int) -> None:
    """Steps are taken while the writer's thread is held before its first byte; what it writes is of before them."""
    engine = start(settings(stage, **DECOUPLED))
    train(engine, range(2))
    before = weights(engine)
    go, real = threading.Event(), checkpoint.write_rank

    def later(*args: Any) -> None:
        go.wait()
        real(*args)

    checkpoint.write_rank = later
    try:
        engine.save_checkpoint(folder)
        assert engine.saving.busy
        expected = train(engine, range(2, 4)), weights(engine)
        assert engine.group.rank or not (folder / "latest").exists()
        go.set()
        engine.wait_for_checkpoint()
    finally:
        go.set()
        checkpoint.write_rank = real
    assert (folder / "latest").read_text() == "global_step2"  # on every rank: rank 0 has moved it
    if engine.group.rank == 0:
        assert same(in_folder(folder), before)
    again = start(settings(stage), seed=7)
    again.load_checkpoint(folder)
    assert (train(again, range(2, 4)), same(weights(again), expected[1])) == (expected[0], True)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_it_writes_what_was_there_when_it_was_called(stage: int, tmp_path: Path) -> None:
    worlds.run(held_up, tmp_path, stage, ranks=3)


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    engine = start(settings(1))
    for step in range(4):
        train(engine, range(step, step + 1))
        engine.save_checkpoint(tmp_path, asynchronous=True)
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 4
    assert {path.name for path in tmp_path.iterdir()} == {"latest", *SCRIPTS, *(f"global_step{n}" for n in range(1, 5))}


def failing(folder: Path, rank: int, at: str) -> str:
    """The disk of one rank is full; says what this rank's trainer hears, and where."""
    engine = start(settings(2))
    train(engine, range(1))
    engine.save_checkpoint(folder, "whole")
    real = write.tensors.write

    def full(path: Path, tensors: Any, *rest: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    if engine.group.rank == rank:
        write.tensors.write = full
    engine.save_checkpoint(folder, "failed", asynchronous=True)
    while engine.saving.busy:
        time.sleep(0.001)  # so that the failure is there when the next call asks
    write.tensors.write = real
    engine.group.barrier()
    said = "".join(traceback.format_exception(heard(engine, folder, at)))
    engine.group.barrier()
    assert engine.load_checkpoint(folder)[0] == str(folder / "whole")
    assert {path.name for path in folder.iterdir()} == {"latest", *SCRIPTS, "whole"}
    return said


def heard(engine: Any, folder: Path, at: str) -> BaseException:
    calls = {
        "save": lambda: engine.save_checkpoint(folder, "next"),
        "wait": engine.wait_for_checkpoint,
        "step": lambda: train(engine, range(1, 2)),
        "destroy": engine.destroy,
    }
    with pytest.raises(CheckpointError) as caught:
        calls[at]()
    engine.zero_grad()
    return caught.value


@pytest.mark.parametrize("at", ["save", "wait", "step", "destroy"])
@pytest.mark.parametrize("rank", [0, 1])
def test_whatever_comes_next_raises_it_on_every_rank(rank: int, at: str, tmp_path: Path) -> None:
    texts = worlds.run(failing, tmp_path, rank, at, ranks=3)
    assert all(f"rank {rank}: " in text and "No space left on device; free space" in text for text in texts)
    assert not any("rank 0: rank" in text for text in texts), "whose it is says it, and nobody for it"
    assert "in full" in texts[rank], "the line in the thread"
    assert "write_behind" in texts[rank]


def test_when_all_have_written_steps_ask_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = start(settings(2)), []
    real = engine.axes.world.all_gather_object

    def counted(obj: Any) -> list[Any]:
        asked.append(obj)
        return real(obj)

    monkeypatch.setattr(engine.axes.world, "all_gather_object", counted)
    train(engine, range(2))
    assert not asked
    engine.save_checkpoint(tmp_path, asynchronous=True)
    engine.saving.settle()
    train(engine, range(2, 3))
    before = len(asked)
    train(engine, range(3, 5))
    assert len(asked) == before


def test_a_failure_is_raised_once_and_the_next_work_runs() -> None:
    work, done = Background(), []
    error = KeyError("lost")

    def fail() -> None:
        raise error

    work.start(fail, "fail")
    with pytest.raises(KeyError) as caught:
        work.wait()
    assert caught.value is error
    work.wait()
    work.start(fail, "fail")
    with pytest.raises(KeyError):
        work.start(fail, "who begins the next hears of the one before")
    work.hopeless.set()  # of the one before
    work.start(lambda: done.append((threading.current_thread().name, work.hopeless.is_set())), "second")
    work.wait()
    assert done == [("second", False)]


def test_python_waits_for_it_and_prints_what_nobody_has_waited_for() -> None:
    code = """
import threading
from refimpl.checkpoint.background import Background
Background().start(lambda: (threading.main_thread().join(), {}['lost']), 'still at work when the script is through')
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "nobody has waited for it" in ended.stderr
    assert "KeyError: 'lost'" in ended.stderr


def test_what_is_given_up_takes_no_file_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank that is still writing: else the folder would stay, with that file in it."""
    new, rmtree = atomic.unfinished(tmp_path / "a", "0123abcd"), shutil.rmtree
    new.mkdir()

    def late(path: Path, **more: Any) -> None:
        with pytest.raises(FileNotFoundError):
            (new / "rank00001.json").touch()
        rmtree(path, **more)

    monkeypatch.setattr(shutil, "rmtree", late)
    atomic.discard(new)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_whose_folder_rank_0_has_given_up_says_so(tmp_path: Path) -> None:
    """Its own error would be of a path that is gone, and the remedy for that a wrong track."""
    notes = {"save": {"id": "x", "rank": 1}}
    with pytest.raises(CheckpointError, match=r"gone: rank 0 has given the save up; what failed is rank 0's error"):
        checkpoint.write_behind(tmp_path / "a", tmp_path / "gone", {}, notes, {}, True, ExitStack(), lambda: False)
