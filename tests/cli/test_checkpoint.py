"""`refimpl checkpoint`: what it shows, what it refuses, what it deletes."""

import errno
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from saving import Net, settings, start, train
from typer.testing import CliRunner

from refimpl.checkpoint import atomic, manifest, prune
from refimpl.checkpoint.errors import CheckpointError
from refimpl.checkpoint.find import given
from refimpl.checkpoint.folder import Folder
from refimpl.checkpoint.write import SCRIPTS
from refimpl.cli.checkpoint import app


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "120"})
    return result.exit_code, result.stdout + result.stderr


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 to 6."""
    folder = tmp_path_factory.mktemp("steps")
    engine = start(settings(2))
    for step in range(6):
        train(engine, range(step, step + 1))
        engine.save_checkpoint(folder)
    return folder


def tags(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("global_step")) for path in folder.iterdir() if path.is_dir()}


def test_show(steps: Path) -> None:
    status, text = run("show", steps)
    assert status == 0
    assert text.index("global_step1 ") < text.index("global_step6 (latest)")
    assert "AdamW" in text
    numel = sum(p.numel() for p in Net().parameters())
    assert f"{numel:,}" in text
    status, text = run("show", steps / "global_step2")
    assert "schedule: WarmupLR; parameter groups: 1; 1 tied names, 3 buffers, 0 names left out" in text


def test_verify(steps: Path, tmp_path: Path) -> None:
    assert run("verify", steps) == (0, f"{steps}/global_step6: 2 files, 0.1 MB, all as they were written\n")
    os.system(f"cp -r {steps}/global_step1 {tmp_path}/copy")
    path = tmp_path / "copy/rank00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)
    status, text = run("verify", tmp_path / "copy")
    assert status == 2
    assert "rank00000.safetensors: its checksum differs" in text


def test_export(steps: Path, tmp_path: Path) -> None:
    status, text = run("export", steps, tmp_path / "out", "--dtype", "bf16", "--exclude-frozen")
    assert (status, text.count("model.safetensors")) == (0, 1)
    weights = load_file(tmp_path / "out/model.safetensors")
    assert weights["into.weight"].dtype == torch.bfloat16
    assert Net().state_dict().keys() - weights.keys() == {"frozen.weight", "frozen.bias"}
    for words, says in (
        (("--dtype", "int4"), "--dtype int4: choose from fp32, bf16, fp16, model"),
        (("--max-shard-size", "big"), "'big' is not a size such as 5GB"),
        ((), "has model.safetensors already"),
    ):
        status, text = run("export", steps, tmp_path / "out", *words)
        assert status == 2
        assert says in text
    status, text = run("export", steps, tmp_path / "parts", "--max-shard-size", "200")
    assert sorted(line.split(": ")[0] for line in text.splitlines()) == sorted(map(str, (tmp_path / "parts").iterdir()))


def test_what_somebody_reads_is_not_pruned(steps: Path, tmp_path: Path) -> None:
    steps = Path(shutil.copytree(steps, tmp_path / "steps"))
    with Folder(*given(steps / "global_step2")):
        status, text = run("prune", steps, "--keep", 1)
    assert (status, text.count("\n")) == (2, 1)
    assert f"{steps / 'global_step2'}: left, somebody is loading or exporting it" in text
    assert {p.name for p in steps.iterdir()} == {"latest", *SCRIPTS, "global_step2", "global_step6"}
    assert run("prune", steps, "--keep", 1)[1].startswith(f"deleted {steps / 'global_step2'}")


def test_what_latest_is_about_to_name_is_not_pruned(
    steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that went back saves step 1 beside step 6, and another process prunes before `latest` is moved."""
    steps = Path(shutil.copytree(steps, tmp_path / "steps"))
    rename = atomic.replace_folder

    def then_prune(*args: Any) -> None:
        rename(*args)
        prune.prune(steps, 1)

    monkeypatch.setattr(atomic, "replace_folder", then_prune)
    engine = start(settings(2))
    train(engine, range(1))
    engine.save_checkpoint(steps, "again")
    assert engine.load_checkpoint(steps)[0] == str(steps / "again")
    assert {p.name for p in steps.iterdir()} == {"latest", *SCRIPTS, "global_step6", "again"}


def test_a_disk_that_cannot_be_written_is_not_pruned(steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(
        CheckpointError, match=r"global_step1/checkpoint.json: Read-only .*; this disk cannot be written"
    ):
        prune.prune(steps, 5)


def test_what_was_saved_anew_meanwhile_is_not_pruned(steps: Path, tmp_path: Path) -> None:
    steps = Path(shutil.copytree(steps, tmp_path / "steps"))
    doomed = prune.found(steps / "global_step1")
    shutil.rmtree(steps / "global_step1")
    (steps / "global_step6").rename(steps / "global_step1")
    prune.delete(doomed)
    assert run("verify", steps / "global_step1")[0] == 0


@pytest.mark.parametrize("moment", ["manifest read", "folder opened", "files listed"])
def test_two_prunes_side_by_side(moment: str, steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one deletes all that both want to, at this moment of the first."""
    steps = Path(shutil.copytree(steps, tmp_path / "steps"))
    module, name = {
        "manifest read": (manifest, "read"),
        "folder opened": (atomic, "alone"),
        "files listed": (manifest, "complete"),
    }[moment]
    real = getattr(module, name)

    def after_another(path: Path) -> Any:
        monkeypatch.setattr(module, name, real)
        there = real(path) if moment == "files listed" else None
        prune.prune(steps, 1)
        return there or real(path)

    monkeypatch.setattr(module, name, after_another)
    prune.prune(steps, 1)
    assert tags(steps) == {6}


def test_what_another_prune_is_deleting_is_not_called_read(steps: Path, tmp_path: Path) -> None:
    steps = Path(shutil.copytree(steps, tmp_path / "steps"))
    with atomic.alone(steps / "global_step1"):
        assert prune.delete(prune.found(steps / "global_step1"))
    assert "global_step1" in {path.name for path in steps.iterdir()}


@pytest.mark.parametrize("one", [True, False])
def test_a_checkpoint_of_deepspeed_is_named(one: bool, tmp_path: Path) -> None:
    folder = tmp_path / "global_step7"
    folder.mkdir()
    (folder / "mp_rank_00_model_states.pt").touch()
    for command, more in (("show", ()), ("verify", ()), ("export", (tmp_path / "out",))):
        status, text = run(command, folder if one else tmp_path, *more)
        assert (status, text.count("\n")) == (2, 1)
        assert "this is a checkpoint of DeepSpeed; `refimpl checkpoint import` reads it" in text


def for_root_alone(real: Callable[..., os.stat_result], path: Any, **more: Any) -> os.stat_result:
    if "lost+found/" in str(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return real(path, **more)


def test_what_is_complete_has_its_name_or_had_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One whose successor was killed, one not finished, and what the root of a disk has, which root alone may look into.
    for name in ("a", ".b.refimpl-old", ".c.refimpl-0123abcd", "lost+found"):
        (tmp_path / name).mkdir()
        (tmp_path / name / manifest.NAME).touch()
    monkeypatch.setattr(os, "stat", partial(for_root_alone, os.stat))
    assert manifest.complete(tmp_path) == ["a", "b"]
    with pytest.raises(OSError, match="too long"):
        manifest.is_in(tmp_path / ("x" * 300))


def test_the_oldest_are_those_of_the_fewest_steps(steps: Path, tmp_path: Path) -> None:
    """Whatever they are called and whenever they were copied. Of a link the link goes, and what it points at stays."""
    for step, name in ((1, "b"), (2, "c"), (3, "a")):
        shutil.copytree(steps / f"global_step{step}", tmp_path / name)
        os.utime(tmp_path / name / manifest.NAME, (0, 9 - step))
    (tmp_path / "d").symlink_to(steps / "global_step4")
    assert [f.tag for f in prune.in_order(tmp_path)] == ["b", "c", "a", "d"]
    (tmp_path / "latest").write_text("c")
    first: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        unlink, iterdir = Path.unlink, Path.iterdir
        patch.setattr(Path, "iterdir", lambda path: iter(sorted(iterdir(path), key=lambda p: p.name == manifest.NAME)))
        patch.setattr(Path, "unlink", lambda path, **more: (first.append(path.name), unlink(path, **more)))
        assert [f.tag for f in prune.prune(tmp_path, 1)] == ["b", "a"]
    assert first[0] == manifest.NAME, "what is half deleted is not taken for whole"
    (tmp_path / "latest").write_text("c")
    shutil.copytree(steps / "global_step5", tmp_path / "e")
    prune.prune(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"c", "e", "latest"}
    assert manifest.is_in(steps / "global_step4")


def test_prune(steps: Path) -> None:
    (steps / "notes").mkdir()
    (steps / "notes/a.txt").write_text("mine")
    (steps / "global_step2/mine.txt").write_text("mine too")
    status, text = run("prune", steps, "--keep", 1, "--every", 3, "--dry-run")
    assert (status, text.count("would delete")) == (0, 4)
    (steps / "latest").write_text("global_step4")
    assert run("prune", steps, "--keep", 1, "--every", 3)[1].count("deleted") == 3
    assert {p.name for p in steps.iterdir()} == {
        "latest",
        *SCRIPTS,
        "notes",
        *(f"global_step{n}" for n in (2, 3, 4, 6)),
    }
    assert [p.name for p in (steps / "global_step2").iterdir()] == ["mine.txt"]
    assert run("prune", steps, "--keep", 3)[1] == f"{steps}: nothing to delete\n"
    for keep, every in ((0, None), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            prune.to_delete([], keep, every, None)
    engine = start(settings(2), seed=4)
    assert engine.load_checkpoint(steps)[0] == str(steps / "global_step4")


@pytest.mark.parametrize("command", ["show", "verify", "export", "prune"])
def test_no_checkpoint_is_one_line(command: str, tmp_path: Path) -> None:
    more = {"export": [tmp_path / "out"], "prune": ["--keep", 1]}.get(command, [])
    status, text = run(command, tmp_path / "nothing", *more)
    assert status == 2
    assert text.count("\n") == 1
    assert "nothing" in text


def test_no_number_is_cut_short_on_a_narrow_terminal(steps: Path) -> None:
    result = CliRunner().invoke(app, ["show", str(steps)], env={"COLUMNS": "40"})
    numel = sum(p.numel() for p in Net().parameters())
    assert f"{numel:,}" in result.stdout
    assert "…" not in result.stdout


def test_what_is_no_text_in_latest_is_named(steps: Path, tmp_path: Path) -> None:
    os.system(f"cp -r {steps}/global_step6 {tmp_path}/global_step6")
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    for command in (["show"], ["verify"], ["prune", "--keep", "1"]):
        status, text = run(command[0], tmp_path, *command[1:])
        assert status == 2
        assert "latest: damaged, it is no text; write a tag into it" in text


@pytest.mark.parametrize("command", ["show", "verify", "export", "prune", "import"])
def test_odd_folders_are_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes/latest")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    more = {"export": [str(tmp_path / "out")], "import": [str(tmp_path / "new")], "prune": ["--keep", "1"]}
    for name, says in (
        ("pipes", r"pipes/latest: is no file|no \*_optim_states.pt and no latest"),
        ("pipe", "pipe: Not a directory; a file stands where a folder is needed"),
        ("loop", "loop: Too many levels of symbolic links; these links lead to each other"),
        ("x" * 300, "xxx: File name too long; choose a shorter tag or folder"),
    ):
        status, text = run(command, tmp_path / name, *more.get(command, []))
        assert status == 2
        assert re.search(says, text)


def test_a_manifest_that_another_program_has_sealed_is_named(steps: Path, tmp_path: Path) -> None:
    os.system(f"cp -r {steps}/global_step6 {tmp_path}/copy")
    path = tmp_path / "copy/checkpoint.json"
    about = manifest.read(path)
    manifest.write(path, {key: value for key, value in about.items() if key not in ("parameters", "version")})
    for command in (["show"], ["verify"], ["export", str(tmp_path / "out")]):
        status, text = run(command[0], tmp_path / "copy", *command[1:])
        assert status == 2
        assert "checkpoint.json: parameters: missing, or of another kind: another program has sealed it" in text
    odd: tuple[dict[str, Any], ...] = ({"files": {"rank00000.json": {"bytes": 1}}}, {"order": [{}]})
    for one in odd:
        manifest.write(path, {key: value for key, value in about.items() if key != "version"} | one)
        for command in (["show"], ["verify"], ["export", str(tmp_path / "out")]):
            status, text = run(command[0], tmp_path / "copy", *command[1:])
            assert (status, f"checkpoint.json: {next(iter(one))}: missing, or of another kind" in text) == (2, True)
    manifest.write(path, {key: value for key, value in about.items() if key != "version"} | {"world_size": 2})
    status, text = run("verify", tmp_path / "copy")
    assert (status, "its files are not two of each of 2 ranks" in text) == (2, True)


def test_weights_are_not_exported_into_a_checkpoint(steps: Path) -> None:
    status, text = run("export", steps, steps / "global_step6")
    assert status == 2
    assert "global_step6: is a checkpoint, whose files come and go with it" in text
