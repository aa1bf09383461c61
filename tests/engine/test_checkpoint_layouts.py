"""A checkpoint belongs to no layout: saved on any axes, it goes on on any others, and is whole without ranks."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_axes import FEEDS, GAS, SHAPE, batch, ranks_of, settings
from torch import Tensor, nn
from worlds import run

from refimpl.checkpoint.export import export, weights
from refimpl.checkpoint.find import given
from refimpl.checkpoint.folder import Folder
from refimpl.engine.initialize import initialize
from refimpl.engine.pipeline import PipelineEngine
from refimpl.model.gpt import GPT
from refimpl.parallel.swap import whole_state_dict

pytestmark = pytest.mark.xdist_group("layouts")  # so that their folders are made once
WHOLE = "stage3_gather_16bit_weights_on_model_save"
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}


def config(axes: dict[str, int], stage: int) -> dict[str, Any]:
    return settings(
        axes, optimizer=ADAM, zero_optimization={"stage": stage, WHOLE: True, "mics_shard_size": axes.get("shard", -1)}
    )


def train(engine: Any, axes: dict[str, int], steps: range) -> list[float]:
    found = []
    for step in steps:
        mine = range(engine.axes.feed, FEEDS, axes.get("dp", 1))
        data = [batch(step, feed, micro) for micro in range(GAS) for feed in mine]
        found.append(engine.train_batch(iter(data)).item())
    return found


def saved(axes: dict[str, int], stage: int, folder: Path) -> list[float]:
    """Two steps, a save, and the losses of two more."""
    torch.manual_seed(0)
    engine, *_ = initialize(model=GPT(SHAPE), config=config(axes, stage))
    train(engine, axes, range(2))
    engine.save_checkpoint(folder, client_state={"rank": engine.global_rank})
    engine.save_16bit_model(folder, "whole.safetensors")
    return train(engine, axes, range(2, 4))


def resumed(axes: dict[str, int], stage: int, folder: Path) -> tuple[list[float], int, dict[str, Tensor]]:
    torch.manual_seed(7)
    engine, *_ = initialize(model=GPT(SHAPE), config=config(axes, stage))
    path, state = engine.load_checkpoint(folder)
    assert path is not None
    assert state is not None
    rename = engine.module.name_in_whole if isinstance(engine, PipelineEngine) else str
    weights = {rename(name): w.clone() for name, w in whole_state_dict(engine.module).items()}
    return train(engine, axes, range(2, 4)), engine.global_steps, weights


LAYOUTS = [
    ({}, 0),
    ({"tp": 2, "dp": 2}, 1),
    ({"pp": 2, "tp": 2}, 1),
    ({"tp": 3}, 0),
    ({"cp": 2, "dp": 2}, 3),
    ({"dp": 4, "shard": 2}, 3),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[float]]]:
    """One folder of each layout, and what followed there."""
    made = {}
    for number, (axes, stage) in enumerate(LAYOUTS):
        folder = tmp_path_factory.mktemp(f"layout{number}")
        made[number] = folder, run(saved, axes, stage, folder, ranks=ranks_of(axes))[0]
    return made


@pytest.mark.parametrize(("there", "here"), [(0, 2), (1, 2), (2, 0), (2, 3), (3, 1), (4, 2), (2, 2), (5, 4), (1, 5)])
def test_it_goes_on_in_any_other_layout(there: int, here: int, folders: dict[int, tuple[Path, list[float]]]) -> None:
    folder, losses = folders[there]
    axes, stage = LAYOUTS[here]
    truth = exported(folder)
    for found, steps, held in run(resumed, axes, stage, folder, ranks=ranks_of(axes)):
        assert steps == 4
        for name, w in held.items():
            assert torch.equal(w, truth[name]), f"{name}: what was saved is what is loaded, bit for bit"
        if there == here:
            assert found == losses
        else:
            assert found == pytest.approx(losses, rel=1e-4), "another layout sums in another order"


def exported(folder: Path) -> dict[str, Tensor]:
    with Folder(*given(folder)) as opened:
        return dict(weights(opened, None))


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_plain_torch_loads_what_any_layout_saved(number: int, folders: Any, tmp_path: Path) -> None:
    folder, losses = folders[number]
    with Folder(*given(folder)) as opened:
        (file,) = export(opened, tmp_path / "out", torch.float32)
    model = GPT(SHAPE)
    model.load_state_dict(load_file(file))
    loss = sum(model(*batch(2, feed, micro)).item() for feed in range(FEEDS) for micro in range(GAS)) / GAS / FEEDS
    assert loss == pytest.approx(losses[0], rel=1e-5)
    together = load_file(folder / "whole.safetensors")
    assert together.keys() == model.state_dict().keys()
    for name, w in model.state_dict().items():
        assert torch.equal(together[name], w), name


def test_another_model_is_refused(folders: Any) -> None:
    def other(folder: Path) -> None:
        engine, *_ = initialize(model=nn.Linear(4, 4), config=config({}, 0))
        engine.load_checkpoint(folder)

    with pytest.raises(Exception, match="these are not this model's weights"):
        other(folders[2][0])


def test_a_torn_folder_is_named(folders: Any, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folders[2][0], copy)
    next(copy.glob("*/rank00003.safetensors")).unlink()
    with pytest.raises(Exception, match=r"rank00003\.safetensors"):
        run(resumed, *LAYOUTS[1], copy, ranks=4)
