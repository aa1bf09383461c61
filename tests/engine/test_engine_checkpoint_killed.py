"""Whenever a save is killed, a whole checkpoint can be loaded; the next save clears what the killed one has left."""

import errno
import itertools
import os
import random
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from saving import same, settings, start, train, tree, weights

from refimpl import launch
from refimpl.checkpoint import atomic, manifest
from refimpl.checkpoint.write import SCRIPTS

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod"}


def killed(at: int, folder: Path, do: Callable[[], object]) -> bool:
    """do() in a process that is killed before its `at`-th call to the file system; whether it came so far."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, here idle ones of torch
        child = os.fork()
    if child == 0:
        calls = itertools.count(1)

        def watch(event: str, args: tuple[Any, ...]) -> None:
            if (event in CHANGES or (event == "open" and str(folder) in str(args[0]))) and next(calls) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        code = 1
        with suppress(BaseException):
            do()
            code = 0
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.parametrize(("tag", "behind"), [("best", False), ("new", False), ("best", True), ("notes", False)])
def test_killed_at_every_call_to_the_file_system(tag: str, behind: bool, tmp_path: Path) -> None:
    pristine, engine = tmp_path / "pristine", start(settings(0))
    train(engine, range(1))
    engine.save_checkpoint(pristine, "other")
    engine.save_checkpoint(pristine, "best")
    for foreign in ("best/mine.txt", ".other.tmp", "notes/a.txt"):
        (pristine / foreign).parent.mkdir(exist_ok=True)
        (pristine / foreign).write_text("somebody else's")
    states = {1: weights(engine)}
    train(engine, range(1, 2))
    states[2] = weights(engine)
    again, seen = start(settings(0), seed=7), set()
    for at in itertools.count(1):
        folder = tmp_path / str(at)
        shutil.copytree(pristine, folder)
        died = killed(at, folder, lambda folder=folder: save(engine, folder, tag, behind))
        again.load_checkpoint(folder)
        seen.add(again.global_steps)
        assert same(weights(again), states[again.global_steps])
        engine.save_checkpoint(folder, "next", save_latest=False)
        before = again.global_steps
        again.load_checkpoint(folder)
        assert again.global_steps == before  # the whole one, that a killed save had put aside, has its name back
        names = {path.name for path in folder.iterdir()} - {"new"}
        assert names == {"latest", *SCRIPTS, "best", "other", "notes", ".other.tmp", "next"}
        kept, now = tree(pristine), tree(folder)
        assert all(now[name] == kept[name] for name in kept if "best" not in name and name != "latest")
        assert now["best/mine.txt"] == kept["best/mine.txt"]
        if not died:
            break
    assert at > 20
    assert seen == {1, 2}


def save(engine: Any, folder: Path, tag: str, behind: bool) -> None:
    engine.save_checkpoint(folder, tag, asynchronous=behind)
    engine.wait_for_checkpoint()


def save_until_killed(folder: Path, tag: str | None, stage: int) -> None:
    """Go on from what is there, and save after every step."""
    engine = start(settings(stage))
    if (folder / "latest").exists():
        engine.load_checkpoint(folder)
    state = weights(engine)
    for step in itertools.count(engine.global_steps):
        if engine.group.rank == 0:
            launch.report((step, {name: w.double().sum().item() for name, w in state.items()}))
        train(engine, range(step, step + 1))
        engine.save_checkpoint(folder, tag)
        state = weights(engine)


def one_save(folder: Path, stage: int) -> int:
    engine = start(settings(stage))
    engine.load_checkpoint(folder)
    engine.save_checkpoint(folder, "end")
    return engine.global_steps


@pytest.mark.parametrize(("stage", "tag"), [(1, "best"), (3, None)])
def test_ranks_killed_at_random(stage: int, tag: str | None, tmp_path: Path) -> None:
    dice, states, last = random.Random(stage), {}, 0
    for _ in range(10):
        with launch.World(2) as world:
            first: list[int] = []

            def heard(rank: int, report: tuple[int, dict[str, float]], world=world, first=first) -> None:
                step, state = report
                assert states.setdefault(step, state) == state
                if not first:
                    victims = dice.choice([world.processes, world.processes[:1], world.processes[1:]])
                    delay = dice.uniform(0, 0.2)
                    threading.Timer(delay, lambda: [process.kill() for process in victims]).start()
                first.append(step)

            with pytest.raises(launch.RankError):
                world.call(save_until_killed, tmp_path, tag, stage, on_report=heard)
        assert first[0] >= last  # what a rank went on from is no older than what was known to be saved
        last = max(first[0], first[-1])
    assert set(launch.run(one_save, tmp_path, stage, ranks=2)) <= {last, last + 1}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def save_beside(folder: Path, tag: str) -> None:
    engine = start(settings(0))
    engine.save_checkpoint(folder, tag)


def test_what_a_living_run_is_writing_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run saves into the same folder while this one is in the middle of a save."""
    from refimpl.checkpoint import manifest

    engine, write, there = start(settings(0)), manifest.write, []

    def meanwhile(path: Path, about: dict[str, Any]) -> None:
        launch.run(save_beside, tmp_path, "theirs", ranks=1)
        there.extend(p.name for p in path.parent.iterdir())
        write(path, about)

    monkeypatch.setattr(manifest, "write", meanwhile)
    engine.save_checkpoint(tmp_path, "mine")
    assert sorted(there) == ["rank00000.json", "rank00000.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "mine", "theirs", *SCRIPTS]
    for tag in ("mine", "theirs"):
        assert engine.load_checkpoint(tmp_path, tag)[0] == str(tmp_path / tag)


def test_of_two_saves_the_one_that_ends_first_gives_nothing_of_the_other_away(tmp_path: Path) -> None:
    def saves() -> AbstractContextManager[bool]:
        return atomic.hold(tmp_path, manifest.NAME, manifest.ours)

    first, second = ExitStack(), ExitStack()
    assert [first.enter_context(saves()), second.enter_context(saves())] == [True, False]
    first.close()
    with saves() as alone:
        assert not alone
    second.close()


def test_what_somebody_keeps_in_a_checkpoint_is_not_put_back_to_what_it_was(tmp_path: Path) -> None:
    """A save that had replaced `a` was killed before it had deleted what `a` was."""
    for name, text in ((".a.refimpl-old", "old"), ("a", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / manifest.NAME).touch()
        (tmp_path / name / "notes.txt").write_text(text)
    with atomic.hold(tmp_path, manifest.NAME, manifest.ours):
        assert [(path.name, (path / "notes.txt").read_text()) for path in tmp_path.iterdir()] == [("a", "new")]


def test_all_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the power that fails: no kill shows it. Files are told by their inodes, which a rename keeps."""
    events: list[tuple[str, int]] = []
    calls = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(handle: int) -> None:
        events.append(("sync", os.fstat(handle).st_ino))
        calls["fsync"](handle)

    def renaming(name: str) -> Callable[[Path, Path], None]:
        def rename(old: Path, new: Path) -> None:
            events.append(("name", os.stat(old).st_ino))
            calls[name](old, new)

        return rename

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renaming("rename"))
    monkeypatch.setattr(os, "replace", renaming("replace"))
    here = tmp_path / "run"
    start(settings(0)).save_checkpoint(here, "a")
    assert events[0] == ("sync", tmp_path.stat().st_ino), "in which the folder of checkpoints was made"
    parent, folder, latest = (path.stat().st_ino for path in (here, here / "a", here / "latest"))
    named, pointed = events.index(("name", folder)), events.index(("name", latest))
    first = {path.name: events.index(("sync", path.stat().st_ino)) for path in (here / "a").iterdir()}
    assert max(first, key=lambda name: first[name]) == manifest.NAME, "it vouches for the others, so they come before"
    assert ("sync", folder) in events[max(first.values()) : named]
    assert ("sync", parent) in events[named:pointed]
    assert ("sync", latest) in events[named:pointed]
    assert events[-1] == ("sync", parent)


def test_a_network_disk_may_not_sync_folders_but_files_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(handle: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / "file").touch()
    atomic.sync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        atomic.sync(tmp_path / "file")
