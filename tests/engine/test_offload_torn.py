"""A step that the disk ends in its middle: every rank is told, half of it is used for nothing, a checkpoint goes on."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from saving import SIZE, same, settings, start, train, weights

from refimpl.checkpoint.errors import CheckpointError
from refimpl.offload.blocks import OffloadError
from refimpl.offload.homes import Disk

PAGE = 4096
HALF = "A step was interrupted in the middle of its update"


def on_disk(stage: int, folder: Path, late: bool) -> dict[str, Any]:
    optimizer = {"device": "nvme", "nvme_path": str(folder), "delayed_update": late}
    config = settings(stage, aio={"block_size": PAGE})
    config["zero_optimization"] |= {"offload_optimizer": optimizer, "sub_group_size": 256}
    return config


def damage(disk: Disk, how: str) -> None:
    """Of the third block and on: a bit changes, or the file ends."""
    path, at = f"/proc/self/fd/{disk.file.descriptor}", 2 * PAGE
    if how == "cut":
        os.truncate(path, at)
        return
    with open(path, "r+b", buffering=0) as file:  # through the page cache: O_DIRECT wants whole pages
        byte = os.pread(file.fileno(), 1, at + 17)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at + 17)


def interrupted(stage: int, how: str, late: bool, folder: Path) -> bool:
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
        damage(home, how)

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
    again = engine if how == "altered" else start(on_disk(stage, folder / "another", late), seed=1)
    again.load_checkpoint(folder / "saved")
    train(again, range(again.global_steps, 4))
    return same(weights(plain), weights(again))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("stage", "how", "late"), [(1, "altered", False), (2, "cut", False), (2, "altered", True), (3, "altered", False)]
)
def test_half_a_step_is_told_on_every_rank_and_a_checkpoint_goes_on(
    stage: int, how: str, late: bool, ranks: int, tmp_path: Path
) -> None:
    assert all(worlds.run(interrupted, stage, how, late, tmp_path, ranks=ranks))
