"""Files whose checksums are right and whose contents are wrong: one error on every rank, and nothing has changed."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from saving import same, settings, start, train, weights

import refimpl
from refimpl.checkpoint import manifest
from refimpl.checkpoint.errors import CheckpointError

FIRST, JSON, TENSORS = "rank00000.json", "rank00001.json", "rank00001.safetensors"
SCALED = {"fp16": {"enabled": True, "initial_scale_power": 4}}


def sealed(folder: Path, change: Callable[[dict[str, Any]], object] = lambda about: None) -> None:
    """The manifest, changed, with right checksums of all that is there."""
    about = manifest.read(folder / manifest.NAME)
    about["files"] = {name: manifest.digest(folder / name) for name in about["files"]}
    change(about)
    manifest.write(folder / manifest.NAME, about)


def noted(key: str, value: Any, *names: str) -> Callable[[Path], None]:
    """The notes of rank 1, or of `names`, say something else, or nothing (None) under `key`."""

    def forge(folder: Path) -> None:
        for name in names or (JSON,):
            notes = json.loads((folder / name).read_bytes())
            notes.pop(key) if value is None else notes.update({key: value})
            (folder / name).write_text(json.dumps(notes))
        sealed(folder)

    return forge


def said(**values: Any) -> Callable[[Path], None]:
    return lambda folder: sealed(folder, lambda about: about.update(values))


def placed(**values: Any) -> Callable[[Path], None]:
    return lambda folder: sealed(folder, lambda about: about["parameters"]["into.weight"].update(values))


def headed(change: Callable[[dict[str, Any]], object], name: str = TENSORS) -> Callable[[Path], None]:
    """The header of a rank's tensors, changed."""

    def forge(folder: Path) -> None:
        data = (folder / name).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        change(header)
        text = json.dumps(header).encode()
        (folder / name).write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
        sealed(folder)

    return forge


def swapped(folder: Path) -> None:
    (folder / TENSORS).rename(folder / "x")
    (folder / "rank00000.safetensors").rename(folder / TENSORS)
    (folder / "x").rename(folder / "rank00000.safetensors")
    sealed(folder)


def renamed(prefix: str) -> Callable[[dict[str, Any]], object]:
    def forge(header: dict[str, Any]) -> None:
        header["lost"] = header.pop(
            next(name for name in header if name.startswith(prefix) and header[name]["shape"] != [0])
        )

    return forge


def overlapping(header: dict[str, Any]) -> None:
    for entry in header.values():
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = [0, end - begin]


FORGED: dict[str, Callable[[Path], None]] = {
    "tensors of two ranks swapped": swapped,
    "three ranks": said(world_size=3),
    "one rank": said(world_size=1),
    "minus one rank": said(world_size=-1),
    "a million ranks": said(world_size=10**9),
    "steps as text": said(global_steps="7"),
    "NaN steps": said(micro_steps=float("nan")),
    "samples below zero": said(global_samples=-3),
    "files as text": said(files="x"),
    "parameters as a list": said(parameters=[]),
    "parameters nested": said(parameters={"into.weight": {"parts": [{"parts": [1]}]}}),
    "tied to nothing": said(tied={"out.weight": "nothing"}),
    "buffers of nothing": said(buffers={"norm.running_mean": 5}),
    "a place below zero": placed(at=-64),
    "a place beyond its buffer": placed(at=10**6),
    "a buffer that does not divide": placed(of=10**6 + 1),
    "a larger buffer": placed(of=10**6),
    "a NaN length": placed(shape=[float("nan"), 64]),
    "lengths below zero": placed(shape=[-64, -64]),
    "another shape": placed(shape=[32, 64]),
    "no dtype": placed(dtype="save"),
    "an integer's dtype": placed(dtype="int64"),
    "ranks that are not there": placed(ranks=[0, 5]),
    "parts of nothing": placed(parts=[{**dict.fromkeys(("at", "of"), 0), "shape": [], "dtype": "float32"}]),
    "a weight lost": headed(renamed("weight/")),
    "a moment lost": headed(renamed("exp_avg_sq/")),
    "a buffer lost": headed(renamed("buffer/")),
    "overlapping": headed(overlapping),
    "integers": headed(lambda header: [e.update(dtype="I32") for e in header.values() if e["dtype"] == "F32"]),
    "no settings of groups": noted("groups", None),
    "too few groups": noted("groups", [], FIRST),
    "a rate as text": noted("groups", [{"lr": "0.1"}]),
    "random garbage": noted("random", {"torch": 3}),
    "a schedule of something": noted("lr_scheduler", {"a": 1}),
    "no schedule": noted("lr_scheduler", None),
    "states as text": noted("state", {"into.weight": "x"}, FIRST, JSON),
    "a state of nothing": noted("state", {"into.bias": {"exp_avg": "cut", "lost": "cut"}}, FIRST, JSON),
    "no client_state": noted("client_state", {"$tensor": "lost"}),
    "nested without end": noted("client_state", {"$tuple": {"$dict": {"$float": [[]]}}}),
    "a scale as text": noted("scaler", {"scale": "x", "left": 1, "good_steps": 0}, FIRST),
    "half a scaler": noted("scaler", {"scale": 2.0}, FIRST),
    "skipped steps as text": noted("skipped_steps", "x", FIRST),
}


def everything(engine: refimpl.Engine) -> list[Any]:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    counters = engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps
    scaler = None if engine.stage.scaler is None else engine.stage.scaler.state_dict()
    moments = [t.clone() for t in engine.stage.update.state()]
    return [groups, dict(engine.lr_scheduler.state_dict()), counters, scaler, torch.get_rng_state().tolist(), moments]


def attacked(base: Path, stage: int) -> list[str]:
    """What loading each forgery says. The engine that tries has trained otherwise, and is as before after each."""
    saving = start(settings(stage, **SCALED))
    train(saving, range(2))
    saving.save_checkpoint(base / "good", "a")
    engine = start(settings(stage, **SCALED), seed=5)
    train(engine, range(3, 6))
    texts = []
    for name, forge in FORGED.items():
        if engine.group.rank == 0:
            shutil.copytree(base / "good", base / name)
            forge(base / name / "a")
        engine.group.barrier()
        before, model = everything(engine), weights(engine)
        try:
            said = f"loaded {engine.load_checkpoint(base / name)}"
        except CheckpointError as error:
            said = str(error)
        unchanged = str(before) == str(everything(engine)) and same(model, weights(engine))
        texts.append(f"{name}: {said}{'' if unchanged else ' CHANGED'}")
    assert engine.load_checkpoint(base / "good")[0] == str(base / "good/a")
    assert same(weights(engine), weights(saving))
    return texts


@pytest.mark.parametrize("stage", [1, 3])
def test_a_forgery_is_one_error_on_every_rank_and_changes_nothing(stage: int, tmp_path: Path) -> None:
    one, two = worlds.run(attacked, tmp_path, stage, ranks=2)
    refused = re.compile(r"[^:]+: .*/a(/checkpoint\.json|/rank0000[01]\.(json|safetensors))?: .*(?<!CHANGED)")
    assert one == two
    odd = [text for text in one if not refused.fullmatch(text)]
    assert not odd, "\n".join(odd)


def pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (pipe, "latest: is no file"),
        (lambda path: path.symlink_to("/dev/zero"), "latest: is no file"),
        (lambda path: path.symlink_to(path), "latest: Too many levels of symbolic links"),
        (lambda path: path.symlink_to("nowhere"), "latest: No such file"),
        (lambda path: path.write_bytes(b"x" * 10_000_000), "latest: damaged, it is longer than any tag"),
        (lambda path: path.write_bytes(os.urandom(4000)), "latest: damaged, it is no text"),
    ],
)
def test_an_odd_latest(make: Callable[[Path], None], match: str, tmp_path: Path) -> None:
    engine = start(settings(1))
    engine.save_checkpoint(tmp_path, "a")
    (tmp_path / "latest").unlink()
    make(tmp_path / "latest")
    with pytest.raises(CheckpointError, match=match) as caught:
        engine.load_checkpoint(tmp_path)
    assert len(str(caught.value)) < 500
    engine.save_checkpoint(tmp_path, "b")
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "b")


def test_a_folder_that_is_a_link(tmp_path: Path) -> None:
    engine = start(settings(1))
    engine.save_checkpoint(tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    assert engine.load_checkpoint(tmp_path / "link")[0] == str(tmp_path / "link/global_step0")
    for target in ("nowhere", "loop"):
        (tmp_path / "loop").unlink(missing_ok=True)
        (tmp_path / "loop").symlink_to(target)
        with pytest.raises(CheckpointError, match=r"loop: (No such file|Too many levels)"):
            engine.load_checkpoint(tmp_path / "loop")
