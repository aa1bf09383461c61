"""A file that was whole when it was checked and then cannot be read: one error on every rank, and nothing goes on."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from saving import SIZE, in_folder, same, settings, start, train, weights
from torch import nn

import refimpl
from refimpl import launch
from refimpl.checkpoint.errors import CheckpointError
from refimpl.checkpoint.tensors import Reader
from refimpl.engine import resume
from refimpl.engine.saving.small_states import Wanted

TAG = "global_step2"


def homes(stage: int, disk: Path | None) -> dict[str, Any]:
    if disk is None:
        return settings(stage)
    nvme = {"device": "nvme", "nvme_path": str(disk)}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 64, "sub_group_size": 640, "offload_optimizer": nvme}
    if stage == 3:
        zero["offload_param"] = nvme | {"max_in_cpu": 0}
    return settings(stage) | {"zero_optimization": zero, "aio": {"block_size": 4096}}


def saved(folder: Path, stage: int) -> None:
    engine = start(settings(stage))
    train(engine, range(2))
    engine.save_checkpoint(folder)


class Failing:
    """A file whose bytes cannot be read."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def readinto(self, view: memoryview) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def fails_at(key: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    """A disk that gives an error where the first tensor of this kind begins."""

    def break_(patch: pytest.MonkeyPatch, folder: Path) -> None:
        read = Reader.read

        def reading(self: Reader, name: str, begin: int, out: torch.Tensor) -> None:
            if name.startswith(key):
                vars(self)["_file"] = Failing(self._file)
            read(self, name, begin, out)

        patch.setattr(Reader, "read", reading)

    return break_


def cut_short(patch: pytest.MonkeyPatch, folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        os.truncate(path, 1000)


def removed(patch: pytest.MonkeyPatch, folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink(missing_ok=True)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch, Path], None], str]] = {
    "weights": (fails_at("weight/"), r"safetensors: Input/output error; the disk fails"),
    "state": (fails_at("exp_avg_sq/"), r"safetensors: Input/output error; the disk fails"),
    "buffers": (fails_at("buffer/"), r"safetensors: Input/output error; the disk fails"),
    "cut short": (cut_short, r"rank0000\d.safetensors: ends inside .*; bring back the file"),
    "removed": (removed, r"rank0000\d.safetensors: No such file or directory; check the path"),
}


def small(engine: refimpl.Engine) -> list[Any]:
    groups = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
    return [engine.global_steps, engine.micro_steps, groups, dict(engine.lr_scheduler.state_dict()), engine.get_lr()]


def broken_off(folder: Path, config: dict[str, Any], fault: str, **how: Any) -> tuple[str, list[float]]:
    """Reading fails on the last rank alone: what every rank is told, and the losses of two steps after a whole load."""
    engine = start(config, seed=5)
    train(engine, range(1))
    before, random = small(engine), torch.get_rng_state()
    break_, says = FAULTS[fault]
    go_on = resume.go_on

    def meanwhile(*args: Any) -> None:
        if engine.group.rank == engine.group.size - 1:
            break_(patch, folder / TAG)
        engine.group.barrier()
        go_on(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "go_on", meanwhile)
        with pytest.raises(CheckpointError, match=says) as caught:
            engine.load_checkpoint(folder, **how)
    assert small(engine) == before
    assert torch.equal(torch.get_rng_state(), random)
    if fault in ("cut short", "removed"):  # random numbers, last in a file, are read first: no weight was touched
        train(engine, range(1))
    else:
        refuses(engine, folder / "other")
    engine.group.barrier()
    again = folder.with_name("spare")
    assert engine.load_checkpoint(again, **how)[0] == str(again / TAG)
    here = weights(engine)
    assert engine.group.rank > 0 or same(in_folder(again), here)
    return str(caught.value), train(engine, range(2, 4))


def refuses(engine: refimpl.Engine, folder: Path) -> None:
    for use in (
        lambda: engine(torch.zeros(4, SIZE)),
        lambda: engine.save_checkpoint(folder),
        engine.stage.full_state_dict,
        engine.stage.state_dict,
        lambda: by_hand(engine),
    ):
        with pytest.raises(RuntimeError, match=rf"{TAG}: loading it failed in its middle.*: load a checkpoint"):
            use()


def by_hand(engine: refimpl.Engine) -> None:
    """A step that does not go through the engine's forward."""
    engine.backward(engine.module(torch.zeros(4, SIZE)))
    engine.step()


def gone_on(folder: Path, config: dict[str, Any]) -> list[float]:
    engine = start(config, seed=6)
    engine.load_checkpoint(folder)
    return train(engine, range(2, 4))


def check(tmp_path: Path, stage: int, ranks: int, fault: str, disk: Path | None, saving: int) -> None:
    worlds.run(saved, tmp_path / "spare", stage, ranks=saving)
    worlds.run(saved, tmp_path / "a", stage, ranks=saving)
    config = homes(stage, disk)
    found = worlds.run(broken_off, tmp_path / "a", config, fault, ranks=ranks)
    assert len({text for text, _ in found}) == 1
    if fault in ("weights", "state", "buffers"):
        assert re.match(rf"rank {ranks - 1}: ", found[0][0])
    assert [losses for _, losses in found] == worlds.run(gone_on, tmp_path / "spare", config, ranks=ranks)


@pytest.mark.parametrize("fault", ["weights", "state", "buffers", "cut short"])
@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (1, 3), (3, 2), (3, 3)])
def test_one_rank_that_cannot_read_is_an_error_on_all(stage: int, ranks: int, fault: str, tmp_path: Path) -> None:
    check(tmp_path, stage, ranks, fault, None, saving=2)


@pytest.mark.parametrize("fault", ["weights", "state", "cut short"])
@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (3, 3)])
def test_as_much_with_a_disk(stage: int, ranks: int, fault: str, tmp_path: Path) -> None:
    check(tmp_path, stage, ranks, fault, tmp_path / "disk", saving=ranks)


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (3, 3)])
def test_files_removed_after_the_check(stage: int, ranks: int, tmp_path: Path) -> None:
    """Saved by four ranks: of what others have written no file is open yet."""
    check(tmp_path, stage, ranks, "removed", None, saving=4)


def weights_alone(folder: Path) -> None:
    """What weights alone have torn, weights alone mend; a torn optimizer they do not."""
    broken_off(folder, settings(1), "weights", load_module_only=True)


def test_a_load_of_the_weights_alone(tmp_path: Path) -> None:
    worlds.run(saved, tmp_path / "spare", 1, ranks=2)
    worlds.run(saved, tmp_path / "a", 1, ranks=2)
    worlds.run(weights_alone, tmp_path / "a", ranks=2)


def with_half_an_optimizer(folder: Path) -> None:
    engine = start(settings(1), seed=5)
    with pytest.MonkeyPatch.context() as patch:
        FAULTS["state"][0](patch, folder)
        with pytest.raises(CheckpointError, match="Input/output error"):
            engine.load_checkpoint(folder)
    engine.load_checkpoint(folder, load_module_only=True)
    with pytest.raises(CheckpointError, match="load a checkpoint with its optimizer state"):
        engine(torch.zeros(4, SIZE))
    engine.load_checkpoint(folder)
    train(engine, range(2, 3))


def test_half_an_optimizer_is_not_mended_by_weights(tmp_path: Path) -> None:
    worlds.run(saved, tmp_path / "a", 1, ranks=2)
    worlds.run(with_half_an_optimizer, tmp_path / "a", ranks=2)


def messages(folder: Path, layers: int) -> int:
    """How often the ranks tell each other something while they load."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)))
    engine = refimpl.initialize(model=model, config=settings(3))[0]
    engine.save_checkpoint(folder, "a")
    kind, count = type(engine.group), 0
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_object", "all_gather", "all_reduce", "broadcast"):
            whole = getattr(kind, name)

            def counted(self: Any, *args: Any, whole: Any = whole, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                return whole(self, *args, **kwargs)

            patch.setattr(kind, name, counted)
        opened = resume.find(folder, "a")
        assert opened is not None
        with resume.Folder(*opened) as there:
            resume.go_on(engine, there, Wanted())
    return count


def test_agreeing_takes_as_many_messages_for_one_layer_as_for_nine(tmp_path: Path) -> None:
    one, nine = (worlds.run(messages, tmp_path / str(layers), layers, ranks=3)[0] for layers in (1, 9))
    assert one == nine == 3  # the small states; all that is read; one bucket of whole parameters is gathered


def replaced(folder: Path, when: str) -> str:
    """Another job saves under the same tag while this one loads: as whole, by its files' lengths too, as the first."""
    engine, real = start(settings(0)), getattr(resume, when)

    def meanwhile(*args: Any) -> Any:
        engine.group.barrier()
        if engine.group.rank == 0:
            (folder / "best").rename(folder / "gone")
            (folder / "next").rename(folder / "best")
        engine.group.barrier()
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, when, meanwhile)
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(folder, "best")
    engine.load_checkpoint(folder, "best")
    return str(caught.value)


def two_saves(folder: Path) -> None:
    engine = start(settings(1))
    for tag in ("best", "next"):
        train(engine, range(2))
        engine.save_checkpoint(folder, tag)


@pytest.mark.parametrize("when", ["check", "go_on"])
def test_a_save_that_replaces_what_is_loaded_is_told_and_nothing_is_mixed(when: str, tmp_path: Path) -> None:
    worlds.run(two_saves, tmp_path, ranks=2)
    for text in launch.run(replaced, tmp_path, when, ranks=2):
        assert f"{tmp_path}/best: another save has taken its place, or somebody has moved it, while it was read" in text
