"""What a disk loses: every rank is told, half a step is used for nothing, a checkpoint goes on."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from saving import SIZE, same, settings, start, train, weights

import refimpl
from refimpl import launch
from refimpl.checkpoint.errors import CheckpointError
from refimpl.checkpoint.write import SCRIPTS
from refimpl.offload.blocks import OffloadError
from refimpl.offload.homes import Disk
from refimpl.zero.reduction.resting import RestingOnDisk

PAGE = 4096
HALF = "A step was interrupted in the middle of its update"
BEFORE = "Nothing was updated: the weights are those of before this step"


def on_disk(stage: int, folder: Path, late: bool) -> dict[str, Any]:
    optimizer = {"device": "nvme", "nvme_path": str(folder), "delayed_update": late}
    config = settings(stage, aio={"block_size": PAGE})
    config["zero_optimization"] |= {"offload_optimizer": optimizer, "sub_group_size": 256}
    return config


def damage(disk: Disk, how: str) -> None:
    """Of the third block and on: somebody changes a bit, the disk does (no date says so), or the file ends."""
    path, at = f"/dev/fd/{disk.file.descriptor}", 2 * PAGE
    if how == "cut":
        os.truncate(path, at)
        return
    before = os.stat(path)
    with open(path, "r+b", buffering=0) as file:  # through the page cache: O_DIRECT wants whole pages
        byte = os.pread(file.fileno(), 1, at + 17)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at + 17)
        later = {"altered": 10**9, "decayed": 0}[how]  # ns: a date that the system's own steps cannot make the same
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + later))


def interrupted(stage: int, late: bool, folder: Path) -> bool:
    """Whether four steps with a damaged disk and a resume are four steps without. Runs on every rank."""
    config = on_disk(stage, folder / "disk", late)
    plain = start(config)
    for steps in (range(2), range(2, 4)):
        train(plain, steps)
        plain.stage.catch_up()  # as a save does
    engine = start(config)
    train(engine, range(2))
    engine.save_checkpoint(folder / "saved", "a")
    last, home = engine.group.size - 1, engine.stage.config.optimizer_home
    if engine.group.rank == last:
        assert isinstance(home, Disk)
        damage(home, "decayed")

    def two_more() -> None:
        train(engine, range(2, 4))
        engine.stage.catch_up()

    with pytest.raises(OffloadError, match=rf"rank {last}: .*disk: bytes 8,192 to 12,288 of the offloaded.*{HALF}"):
        two_more()
    for use in (
        lambda: engine(torch.zeros(4, SIZE)),
        lambda: engine.save_checkpoint(folder / "saved", "b"),
        lambda: engine.stage.full_state_dict(),
        lambda: engine.stage.state_dict(),
    ):
        with pytest.raises((OffloadError, CheckpointError), match=HALF):
            use()
    assert not (folder / "saved/b").exists()
    again = engine if stage != 2 or late else start(on_disk(stage, folder / "another", late), seed=1)
    again.load_checkpoint(folder / "saved")
    train(again, range(again.global_steps, 4))
    return same(weights(plain), weights(again))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("stage", "late"), [(1, False), (2, False), (2, True), (3, False)])
def test_half_a_step_is_told_on_every_rank_and_a_checkpoint_goes_on(
    stage: int, late: bool, ranks: int, tmp_path: Path
) -> None:
    assert all(worlds.run(interrupted, stage, late, tmp_path, ranks=ranks))


def noticed(stage: int, how: str, late: bool, folder: Path) -> bool:
    """Whether a step before which somebody changed a file changes nothing, and a resume goes on. Runs on every rank."""
    plain, engine = (start(on_disk(stage, folder / name, late)) for name in ("plain", "disk"))
    train(plain, range(2))
    plain.stage.catch_up()
    train(engine, range(2))
    engine.save_checkpoint(folder / "saved", "a")
    before, last = trained(engine), engine.group.size - 1
    if engine.group.rank == last:
        damage(engine.stage.config.optimizer_home, how)
    for step in (2, 3):
        with pytest.raises(
            OffloadError, match=rf"rank {last}: .*disk: bytes 8,192 to 12,288 of the offloaded.*{BEFORE}"
        ):
            train(engine, range(step, step + 1))
    kept = same(before, trained(engine))
    engine.load_checkpoint(folder / "saved")
    for each in (plain, engine):
        train(each, range(2, 4))
        each.stage.catch_up()
    return kept and same(weights(plain), weights(engine))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("stage", "how", "late"), [(1, "altered", False), (2, "cut", False), (2, "altered", True), (3, "altered", False)]
)
def test_a_file_that_somebody_changed_is_noticed_before_a_step_changes_anything(
    stage: int, how: str, late: bool, ranks: int, tmp_path: Path
) -> None:
    assert all(worlds.run(noticed, stage, how, late, tmp_path, ranks=ranks))


def untouched(folder: Path) -> list[int]:
    """Bytes read by each of five steps, before the last of which somebody has changed the file's date alone."""
    engine = start(on_disk(2, folder, late=False))
    file, read = engine.stage.config.optimizer_home.file, []
    for step in range(5):
        begun = file.read_bytes
        if step == 4:
            os.utime(file.descriptor, (0, 0))
        train(engine, range(step, step + 1))
        read.append(file.read_bytes - begun)
    return read


def test_all_is_read_once_more_only_where_a_date_is_new(tmp_path: Path) -> None:
    for _, second, third, fourth, last in worlds.run(untouched, tmp_path, ranks=2):  # the first makes the state
        assert second == third == fourth
        assert last == 2 * second


def all_on_disk(folder: Path, stage: int = 3) -> dict[str, Any]:
    config = on_disk(stage, folder, late=False) | {"gradient_accumulation_steps": 2}
    if stage == 3:
        config["zero_optimization"] |= {
            "offload_param": {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0},
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
        }
    return config


def lost_parameters(moment: str, folder: Path) -> bool:
    """Whether every use of weights of which the last rank's disk has lost some says so. Runs on every rank."""
    engine = start(all_on_disk(folder / "disk"))
    train(engine, range(2))
    engine.save_checkpoint(folder / "before")
    x, last = torch.ones(4, SIZE), engine.group.size - 1
    loss = engine(x) if moment == "backward" else torch.zeros(())
    if engine.group.rank == last:
        home = engine.stage.config.parameter_home
        assert isinstance(home, Disk)
        os.truncate(home.file.descriptor, 0)
    uses: dict[str, Callable[[], object]] = {
        "forward": lambda: engine(x),
        "show": lambda: weights(engine),
        "save": lambda: engine.save_checkpoint(folder / "saved"),
        "load": lambda: engine.load_checkpoint(folder / "before"),
    }
    for use in ((lambda: engine.backward(loss)) if moment == "backward" else uses[moment], *uses.values()):
        with pytest.raises((OffloadError, CheckpointError), match=rf"rank {last}: .*disk: bytes .* of the offloaded"):
            use()
    return not (folder / "saved/latest").exists()


@pytest.mark.parametrize(
    ("moment", "ranks", "transport"), [("forward", 2, ""), ("backward", 3, ""), ("show", 3, ""), ("forward", 3, "gloo")]
)
def test_lost_parameters_are_named_on_every_rank(
    moment: str, ranks: int, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport:
        monkeypatch.setenv("REFIMPL_TRANSPORT", transport)
    assert all(launch.run(lost_parameters, moment, tmp_path, ranks=ranks))  # whose ranks are of no more use then


def trained(engine: refimpl.Engine) -> dict[str, torch.Tensor]:
    """The weights without what every forward changes."""
    return {name: w for name, w in weights(engine).items() if not name.startswith("norm.")}


def lost_gradients(stage: int, how: str, folder: Path) -> bool:
    """Whether gradients that cannot be kept leave the state as it was, and training goes on when the disk is well.

    Runs on every rank.
    """
    plain = start(all_on_disk(folder / "plain", stage))
    engine = start(all_on_disk(folder / "disk", stage))
    for each in (plain, engine):
        train(each, range(4))
    before, last = trained(engine), engine.group.size - 1
    assert isinstance(engine.stage.update.resting, RestingOnDisk)
    train(engine, range(4, 5))
    with pytest.MonkeyPatch.context() as patch:
        if engine.group.rank == last:
            patch.setattr(os, how, lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(
            OffloadError, match=rf"rank {last}: .*disk: cannot (read|write): Input.*Nothing was updated"
        ):
            train(engine, range(5, 6))
    kept = same(before, trained(engine))
    for each in (plain, engine):
        train(each, range(4, 8))
    return kept and same(trained(plain), trained(engine))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("stage", "how"), [(2, "preadv"), (2, "pwritev")])
def test_lost_gradients_leave_the_state_before_the_step(stage: int, how: str, ranks: int, tmp_path: Path) -> None:
    assert all(worlds.run(lost_gradients, stage, how, tmp_path, ranks=ranks))


def loaded_over(home: str, folder: Path) -> bool:
    """Whether a load mends what a disk has lost between two steps. Runs on every rank."""
    engine = start(all_on_disk(folder / "disk"))
    train(engine, range(4))
    engine.save_checkpoint(folder / "saved")
    before = weights(engine)
    if engine.group.rank == 0:
        damage(getattr(engine.stage.config, f"{home}_home"), "altered")
    engine.load_checkpoint(folder / "saved")
    return same(before, weights(engine))


@pytest.mark.parametrize(("home", "ranks"), [("parameter", 2), ("optimizer", 3)])
def test_a_load_replaces_what_a_disk_has_lost(home: str, ranks: int, tmp_path: Path) -> None:
    assert all(worlds.run(loaded_over, home, tmp_path, ranks=ranks))


def saved_behind(stage: int, folder: Path) -> bool:
    """Whether an asynchronous save of what one rank's disk has lost leaves the one before alone. Runs on every rank."""
    engine = start(on_disk(stage, folder / "disk", late=False))
    train(engine, range(2))
    engine.save_checkpoint(folder / "saved", "a")
    last = engine.group.size - 1
    if engine.group.rank == last:
        damage(engine.stage.config.optimizer_home, "altered")
    with pytest.raises(CheckpointError, match=rf"^rank {last}: .*saved/b: .*disk: bytes 8,192 to 12,288"):
        engine.save_checkpoint(folder / "saved", "b", asynchronous=True)
    engine.wait_for_checkpoint()
    return {path.name for path in (folder / "saved").iterdir()} == {"a", "latest", *SCRIPTS}


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (3, 3)])
def test_a_save_behind_the_training_of_what_is_lost_is_told_on_every_rank(
    stage: int, ranks: int, tmp_path: Path
) -> None:
    assert all(launch.run(saved_behind, stage, tmp_path, ranks=ranks))
