"""What cannot be written is an error on every rank that names the rank and the file; what was there is there still."""

import errno
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import worlds
from saving import settings, start, train, tree

from refimpl import launch
from refimpl.checkpoint import atomic, manifest
from refimpl.checkpoint.errors import CheckpointError
from refimpl.checkpoint.write import SCRIPTS


def limited(folder: Path, rank: int, limit: int, tag: str) -> str:
    """A save in which one rank's files must not grow over `limit` bytes: the write fails in the middle."""
    engine = start(settings(1))
    train(engine, range(1))
    engine.save_checkpoint(folder, "best", client_state={"of": "before"})
    before = tree(folder)
    train(engine, range(1, 2))
    if engine.group.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder, tag)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    engine.group.barrier()
    assert tree(folder) == before
    engine.group.barrier()
    assert engine.load_checkpoint(folder)[1] == {"of": "before"}
    engine.save_checkpoint(folder, tag)  # all is well again
    assert engine.load_checkpoint(folder)[0] == str(folder / tag)
    return str(caught.value)


@pytest.mark.parametrize("tag", ["best", "new"])
@pytest.mark.parametrize(
    ("rank", "limit", "name"),
    [
        (1, 4000, "rank00001.safetensors"),
        (0, 4000, "rank00000.safetensors"),
        (0, 3, "rank00000.safetensors"),
        (2, 0, "rank00002.safetensors"),
    ],
)
def test_a_full_disk_on_one_rank_is_an_error_on_all(rank: int, limit: int, name: str, tag: str, tmp_path: Path) -> None:
    texts = launch.run(limited, tmp_path, rank, limit, tag, ranks=3)
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"rank {rank}: ")
    assert f"{name}: File too large; raise the limit" in texts[0]


def refusing(folder: Path, rank: int, name: str, number: int, do: str) -> str:
    """A save in which one rank may not open its file `name`, as on a disk that is full or cannot be written."""
    engine = start(settings(0))
    armed = engine.group.rank == rank

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if armed and event == "open" and name in str(args[0]) and str(folder) in str(args[0]) and args[2] & os.O_CREAT:
            raise OSError(number, os.strerror(number), args[0])

    sys.addaudithook(refuse)
    if do == "behind":
        engine.save_checkpoint(folder, asynchronous=True)
    ways = {"save": lambda: engine.save_checkpoint(folder), "behind": engine.wait_for_checkpoint}
    with pytest.raises(CheckpointError) as caught:
        ways.get(do, lambda: engine.save_16bit_model(folder, "m.bin"))()
    engine.group.barrier()
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")]
    armed = False
    assert engine.save_checkpoint(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rank", "name", "number", "says"),
    [
        (1, "rank00001.safetensors", errno.ENOSPC, "No space left on device; free space"),
        (0, "rank00000.json", errno.ENOSPC, "No space left on device; free space"),
        (0, "checkpoint.json", errno.EDQUOT, "quota"),
        (0, "latest", errno.EROFS, "Read-only file system; this disk cannot be written"),
        (1, "rank00001.safetensors", errno.EACCES, "Permission denied; change the permissions"),
    ],
)
def test_a_file_that_cannot_be_opened(rank: int, name: str, number: int, says: str, tmp_path: Path) -> None:
    texts = launch.run(refusing, tmp_path, rank, name, number, "save", ranks=2)
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"rank {rank}: ")
    assert f"{name}: " in texts[0]
    assert says in texts[0]


@pytest.mark.parametrize(("ranks", "name"), [(2, "refimpl-"), (3, "refimpl-"), (3, "rank00001.safetensors")])
def test_a_rank_whose_disk_takes_not_even_a_word(ranks: int, name: str, tmp_path: Path) -> None:
    """Rank 0's thread, which waits for that rank's files, hears of it from the ranks that ask for the save."""
    for text in launch.run(refusing, tmp_path, 1, name, errno.EROFS, "behind", ranks=ranks, timeout=20):
        assert text.startswith("rank 1: ")
        assert "rank00001.safetensors: Read-only file system; this disk cannot be written" in text


def taken_away(folder: Path) -> str:
    """Another run, which replaces the same tag, is a moment ahead."""
    engine, discard = start(settings(1)), atomic.discard
    engine.save_checkpoint(folder, "best")

    def ahead(path: Path) -> None:
        if (folder / "best").exists():
            (folder / "best").rename(folder / "its")
        discard(path)

    with mock.patch.object(atomic, "discard", ahead), pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder, "best")
    engine.group.barrier()
    assert {path.name for path in folder.iterdir()} == {"its", "latest", *SCRIPTS}
    return str(caught.value)


def test_a_tag_that_another_run_replaces_at_the_same_moment(tmp_path: Path) -> None:
    texts = worlds.run(taken_away, tmp_path, ranks=3)
    assert len(set(texts)) == 1
    assert re.match(r"rank 0: .*/best has gone meanwhile; another run saves there at this moment: give each", texts[0])


def test_what_cannot_be_replaced_keeps_its_name(tmp_path: Path) -> None:
    new, folder, rename = tmp_path / "new", tmp_path / "best", os.rename
    new.mkdir()
    folder.mkdir()
    (folder / "weights").write_text("kept")

    def failing(old: Path, name: Path) -> None:
        if old == new:
            raise OSError(errno.EIO, "Input/output error")
        rename(old, name)

    with mock.patch.object(os, "rename", failing), pytest.raises(OSError, match="Input/output"):
        atomic.replace_folder(new, folder, manifest.ours)
    assert (folder / "weights").read_text() == "kept"


def test_a_16bit_model_that_cannot_be_written(tmp_path: Path) -> None:
    texts = launch.run(refusing, tmp_path, 0, "m.bin", errno.ENOSPC, "16bit", ranks=2)
    assert len(set(texts)) == 1
    assert "rank 0: " in texts[0]
    assert "m.bin: No space left on device; free space" in texts[0]


@pytest.mark.parametrize("name", ["m.bin", "m.safetensors"])
def test_a_16bit_model_that_fails_half_way_leaves_the_old_one(name: str, tmp_path: Path) -> None:
    launch.run(half_16bit, tmp_path, name, ranks=1)


def half_16bit(folder: Path, name: str) -> None:
    engine = start(settings(0))
    engine.save_16bit_model(folder, name)
    before = tree(folder)
    train(engine, range(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError, match=rf"{name}: .*File too large.*; raise the limit"):
        engine.save_16bit_model(folder, name)
    assert tree(folder) == before


def test_a_16bit_model_clears_what_a_killed_one_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(settings(0))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            engine.save_16bit_model(tmp_path, "m.bin")
    assert len(os.listdir(tmp_path)) == 1
    engine.save_16bit_model(tmp_path, "m.bin")
    assert os.listdir(tmp_path) == ["m.bin"]


def test_a_16bit_model_over_a_folder(tmp_path: Path) -> None:
    (tmp_path / "m.bin").mkdir()
    with pytest.raises(CheckpointError, match=r"m.bin: Is a directory; a folder stands where a file is needed"):
        start(settings(0)).save_16bit_model(tmp_path, "m.bin")
    assert not [path for path in tmp_path.iterdir() if path.name != "m.bin"]


def test_everybody_may_read_the_weights(tmp_path: Path) -> None:
    start(settings(0)).save_checkpoint(tmp_path, "a")
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "a").iterdir()}
    assert modes.keys() == {"checkpoint.json", "rank00000.json", "rank00000.safetensors"}
    assert len(set(modes.values())) == 1


def test_what_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    engine = start(settings(0))
    engine.module.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"buffer/odd: safetensors has no torch\.complex128"):
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


def test_whole_weights_of_stage_3_are_written_where_the_file_says_so(tmp_path: Path) -> None:
    key = r"zero_optimization\.stage3_gather_16bit_weights_on_model_save"
    with pytest.warns(UserWarning, match=f"save_16bit_model wrote nothing: set {key} to true"):
        assert start(settings(3)).save_16bit_model(tmp_path) is False
    assert not list(tmp_path.iterdir())
