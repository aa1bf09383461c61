"""What is damaged, foreign or cannot be written is an error on every rank that names the file; nothing has changed."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from saving import same, settings, start, train, tree, weights
from torch import Tensor

import refimpl
from refimpl.checkpoint import manifest
from refimpl.checkpoint.errors import CheckpointError
from refimpl.checkpoint.write import SCRIPTS

TAG = "global_step1"


def state(engine: refimpl.Engine) -> list[Any]:
    """Everything that a load could change, copied."""
    tensors = [t.clone() for t in (*engine.module.state_dict().values(), *engine.stage.update.state())]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
    scheduler = dict(engine.lr_scheduler.state_dict()) if engine.lr_scheduler else None
    return [*tensors, groups, scheduler, engine.global_steps, engine.micro_steps, engine.global_samples]


def unchanged(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(before, after, strict=True)
    )


def refused(engine: refimpl.Engine, folder: Path, match: str, **how: Any) -> None:
    """Loading is a CheckpointError with `match`, and leaves both sides as they are."""
    before, files = state(engine), tree(folder) if folder.is_dir() else None
    with pytest.raises(CheckpointError, match=match):
        engine.load_checkpoint(folder, **how)
    assert unchanged(before, state(engine))
    assert files is None or tree(folder) == files


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    engine = start(settings(1))
    train(engine, range(1))
    engine.save_checkpoint(tmp_path / "a")
    return tmp_path / "a"


@pytest.fixture
def other() -> refimpl.Engine:
    """An engine that has trained other weights, and has everything to lose."""
    engine = start(settings(1), seed=5)
    train(engine, range(3, 6))
    return engine


FILES = ["checkpoint.json", "rank00000.json", "rank00000.safetensors"]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere(name: str, saved: Path, other: refimpl.Engine) -> None:
    path = saved / TAG / name
    content = path.read_bytes()
    everywhere = range(0, len(content), max(1, len(content) // 25))
    for place in (*everywhere, len(content) - 2):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        refused(other, saved, match=name)
        refused(other, saved, match=name, load_module_only=True)
    path.write_bytes(content)
    assert other.load_checkpoint(saved)[0] == str(saved / TAG)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_file_cut_short(name: str, keep: int, saved: Path, other: refimpl.Engine) -> None:
    path = saved / TAG / name
    path.write_bytes(path.read_bytes()[:keep])
    refused(other, saved, match=name)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(name: str, saved: Path, other: refimpl.Engine) -> None:
    (saved / TAG / name).unlink()
    refused(other, saved, match=f"{name}: no such file")
    refused(other, saved, match=f"{name}: no such file", load_optimizer_states=False)


@pytest.mark.parametrize("name", FILES)
def test_a_folder_in_place_of_a_file(name: str, saved: Path, other: refimpl.Engine) -> None:
    (saved / TAG / name).unlink()
    (saved / TAG / name).mkdir()
    refused(other, saved, match=f"{name}: no such file")


@pytest.mark.parametrize("name", ["rank00000.json", "rank00000.safetensors"])
def test_a_file_of_another_save(name: str, saved: Path, other: refimpl.Engine, tmp_path: Path) -> None:
    other.save_checkpoint(tmp_path / "b", "b")
    shutil.copy(tmp_path / "b/b" / name, saved / TAG / name)
    refused(other, saved, match=rf"{name}: .*(another save|were written)")


def test_a_rank_file_that_its_manifest_vouches_for_falsely(saved: Path, other: refimpl.Engine, tmp_path: Path) -> None:
    other.save_checkpoint(tmp_path / "b", "b")
    path = saved / TAG / "rank00000.json"
    shutil.copy(tmp_path / "b/b/rank00000.json", path)
    about = manifest.read(saved / TAG / manifest.NAME)
    about["files"]["rank00000.json"] = manifest.digest(path)
    manifest.write(saved / TAG / manifest.NAME, about)
    refused(other, saved, match=r"rank00000.json: belongs to another save")


@pytest.mark.parametrize("value", [{"$dtype": "save"}, {"$device": "nowhere"}, {"$tensor": "lost"}])
def test_a_client_state_that_cannot_be_read_changes_nothing(
    value: dict[str, str], saved: Path, other: refimpl.Engine
) -> None:
    path = saved / TAG / "rank00000.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"client_state": {"x": value}}))
    about = manifest.read(saved / TAG / manifest.NAME)
    about["files"]["rank00000.json"] = manifest.digest(path)
    manifest.write(saved / TAG / manifest.NAME, about)
    refused(other, saved, match=r"rank00000.json: (ValueError: torch.save is no dtype|RuntimeError|KeyError: 'lost')")


def swapped(folder: Path) -> None:
    engine = start(settings(1))
    train(engine, range(1))
    engine.save_checkpoint(folder)
    one, two = (folder / TAG / f"rank0000{rank}.safetensors" for rank in range(2))
    if engine.group.rank == 0:
        one.rename(folder / "one")
        two.rename(one)
        (folder / "one").rename(two)
    engine.group.barrier()
    refused(engine, folder, match=r"rank 0: .*rank00000.safetensors: .* were written.*rank 1: .*rank00001.safetensors")


def test_two_rank_files_swapped(tmp_path: Path) -> None:
    worlds.run(swapped, tmp_path, ranks=2)


def damaged_for_one(folder: Path, name: str) -> None:
    engine = start(settings(1))
    train(engine, range(1))
    engine.save_checkpoint(folder)
    if engine.group.rank == 0:
        (folder / TAG / name).write_bytes(b"?")
    engine.group.barrier()
    refused(engine, folder, match=f"{name}: 1 bytes")


@pytest.mark.parametrize("name", ["rank00001.json", "rank00001.safetensors"])
def test_a_file_that_one_rank_reads_is_an_error_on_all(name: str, tmp_path: Path) -> None:
    worlds.run(damaged_for_one, tmp_path, name, ranks=3)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda about: {k: v for k, v in about.items() if k != "version"}, "of version 1"),
        (lambda about: about | {"version": 99}, "of version 99"),
        (lambda about: about | {"global_steps": 7}, "edited"),
        (lambda about: {k: v for k, v in about.items() if k != "files"}, "edited"),
        (lambda about: {}, "of version 1"),
        (lambda about: [about], "of version None"),
    ],
)
def test_a_manifest_of_another_version_or_edited(
    edit: Callable[[dict[str, Any]], Any], match: str, saved: Path, other: refimpl.Engine
) -> None:
    path = saved / TAG / manifest.NAME
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    refused(other, saved, match=rf"checkpoint.json: .*{match}.*(load another|Load it with)")


def test_a_checkpoint_of_pickles_is_not_read_and_its_weights_are_named(saved: Path, other: refimpl.Engine) -> None:
    """What refimpl wrote before: `.pt` files a rank, and the whole weights as safetensors."""
    path = saved / TAG / manifest.NAME
    (saved / TAG / "model.safetensors").touch()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 3}))
    refused(other, saved, match=r"of version 3, .*Its weights are in .*model.safetensors.*are pickles")


@pytest.mark.parametrize(
    ("latest", "match"),
    [
        ("", r"latest: is empty.*global_step1"),
        ("\n", r"latest: is empty.*global_step1"),
        ("global_step9", r"global_step9.*no such file.*latest names it.*complete checkpoints.*global_step1"),
        ("../a/global_step1", r"latest: .* is no tag"),
        ("\x00", r"latest: .* is no tag"),
        (b"\xff\xfe", r"latest: damaged, it is no text; write a tag into it, or pass one"),
    ],
)
def test_a_latest_that_names_nothing(latest: str | bytes, match: str, saved: Path, other: refimpl.Engine) -> None:
    (saved / "latest").write_bytes(latest if isinstance(latest, bytes) else latest.encode())
    refused(other, saved, match=match)


def test_a_folder_in_place_of_latest_and_a_file_in_place_of_a_folder(saved: Path, other: refimpl.Engine) -> None:
    (saved / "latest").unlink()
    (saved / "latest").mkdir()
    refused(other, saved, match=r"latest: Is a directory; a folder stands where a file is needed")
    file = saved / "file"
    file.touch()
    refused(other, file, match=r"file: Not a directory; a file stands where a folder is needed")
    refused(other, saved, match=r"file/checkpoint.json: no such file", tag="file")
    with pytest.raises(CheckpointError, match=r"file: File exists; move what is there away"):
        other.save_checkpoint(file)
    with pytest.raises(CheckpointError, match=r"file: Not a directory; a file stands where a folder is needed"):
        other.save_checkpoint(saved, "file")
    with pytest.raises(CheckpointError, match=r"latest: Is a directory"):
        other.save_checkpoint(saved, "whole")
    assert other.load_checkpoint(saved, "whole")[0] == str(saved / "whole")


def test_the_checkpoint_itself_given_as_the_folder(saved: Path, other: refimpl.Engine) -> None:
    refused(other, saved / TAG, match=r"is a checkpoint itself; pass its parent, and tag='global_step1'")


def test_a_checkpoint_that_latest_does_not_name_is_told(saved: Path, other: refimpl.Engine) -> None:
    (saved / "latest").unlink()
    with pytest.warns(UserWarning, match=r"no file `latest`.*global_step1"):
        assert other.load_checkpoint(saved) == (None, None)


@pytest.mark.parametrize("tag", ["", "a/b", "..", ".", "/abs", "latest", ".hidden", " a", "a\n", "a\x00b"])
def test_a_tag_that_is_no_name(tag: str, saved: Path, other: refimpl.Engine) -> None:
    before = tree(saved.parent)
    with pytest.raises(CheckpointError, match=r"is no tag"):
        other.save_checkpoint(saved, tag)
    refused(other, saved, match=r"is no tag", tag=tag)
    assert tree(saved.parent) == before


def test_a_tag_that_is_too_long(saved: Path, other: refimpl.Engine) -> None:
    with pytest.raises(CheckpointError, match=r"xxx: File name too long; choose a shorter tag"):
        other.save_checkpoint(saved, "x" * 300)
    refused(other, saved, match=r"xxx: File name too long; choose a shorter tag", tag="x" * 300)


@pytest.mark.parametrize("save_dir", ["", None])
def test_no_folder_to_save_to(save_dir: Any, other: refimpl.Engine) -> None:
    with pytest.raises(ValueError, match="save_dir"):
        other.save_checkpoint(save_dir)


def test_a_folder_that_is_no_checkpoint_is_not_replaced(saved: Path, other: refimpl.Engine) -> None:
    """Scripts save their tokenizer there first; DeepSpeed writes beside it too."""
    (saved / "data").mkdir()
    (saved / "data/precious.txt").write_text("years of work")
    (saved / "link").symlink_to("data")
    with pytest.raises(CheckpointError, match=r"link: a link to something else than a checkpoint.*another tag"):
        other.save_checkpoint(saved, "link")
    assert [path.name for path in (saved / "data").iterdir()] == ["precious.txt"]
    assert other.save_checkpoint(saved, "data")
    assert other.save_checkpoint(saved, "data")
    assert (saved / "data/precious.txt").read_text() == "years of work"
    (saved / "empty").mkdir()
    for tag in ("data", "empty"):
        assert other.save_checkpoint(saved, tag)
        assert other.load_checkpoint(saved)[0] == str(saved / tag)


def test_a_tag_that_is_a_link_is_replaced_and_what_it_points_at_kept(saved: Path, other: refimpl.Engine) -> None:
    (saved / "best").symlink_to(TAG)
    before = tree(saved / TAG)
    assert other.load_checkpoint(saved, "best")[0] == str(saved / "best")
    other.save_checkpoint(saved, "best")
    assert not (saved / "best").is_symlink()
    assert tree(saved / TAG) == before
    assert sorted(path.name for path in saved.iterdir()) == ["best", TAG, "latest", *SCRIPTS]


def test_another_optimizer_or_schedule_is_refused(saved: Path) -> None:
    lion = start(settings(1, optimizer={"type": "Lion", "params": {"lr": 0.01}}))
    refused(lion, saved, match="optimizer AdamW there, Lion here")
    cosine = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}
    other = start(settings(1, scheduler=cosine))
    refused(other, saved, match=r"schedule is WarmupLR, here WarmupCosineLR.*load_lr_scheduler_states=False")
    other.load_checkpoint(saved, load_lr_scheduler_states=False)
    assert other.global_steps == 1


def test_a_schedule_that_cannot_be_restored(saved: Path, other: refimpl.Engine, monkeypatch: Any) -> None:
    def half(self: Any, state: dict[str, Any]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]
        if state["last_batch_iteration"] == 0:
            raise KeyError("total_num_steps")

    monkeypatch.setattr(type(other.lr_scheduler), "load_state_dict", half)
    refused(other, saved, match=r"rank00000.json: KeyError: 'total_num_steps'")


def different_folders(folder: Path, tag: str | None) -> str:
    """Rank 1 sees a folder without the checkpoint that rank 0 sees."""
    engine = start(settings(0))
    own = folder / f"own{engine.group.rank}"
    engine.save_checkpoint(folder / "own0", "a")
    own.mkdir(exist_ok=True)
    before = weights(engine)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(own, tag)
    assert same(before, weights(engine))
    return str(caught.value)


@pytest.mark.parametrize(
    ("tag", "says"), [(None, r"rank 0: a of save \w+, rank 1: none; use a folder"), ("a", "rank 1: .*no such file")]
)
def test_a_folder_that_only_one_rank_sees(tag: str | None, says: str, tmp_path: Path) -> None:
    texts = worlds.run(different_folders, tmp_path, tag, ranks=2)
    assert all(re.search(says, text) for text in texts)
