"""`offload_optimizer`, `offload_param`, `aio`: the same training from any JSON, or an error that names the key."""

import errno
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import worlds
from test_engine import Net, batch, config
from torch import Tensor

import refimpl
from refimpl.comm.group import Group
from refimpl.engine.config import load_config
from refimpl.engine.configuration.keys import ConfigWarning
from refimpl.engine.homes import with_homes
from refimpl.launch import RankError
from refimpl.offload import blocks
from refimpl.offload.blocks import Aio, OffloadError
from refimpl.offload.homes import Disk, Host
from refimpl.zero.config import ZeroConfig

CPU, NVME = {"device": "cpu", "pin_memory": True}, {"device": "nvme", "buffer_count": 3, "pipeline_read": True}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 0.1}
AIO = {"aio": {"block_size": 512, "queue_depth": 2, "overlap_events": False}}


def trained(settings: dict[str, Any], steps: int, folder: Path | None = None, go_on: bool = False) -> dict[str, Tensor]:
    """Runs on every rank: the weights after so many steps, saved in `folder` after two or loaded from there."""
    engine, *_ = refimpl.initialize(model=Net(), config=settings)
    first = 0
    if go_on:
        engine.load_checkpoint(folder)
        first = engine.global_steps
    for step in range(first, steps):
        engine.backward(engine(batch(engine.group.rank, step, 0)))
        engine.step()
        if folder is not None and not go_on and step == 1:
            engine.save_checkpoint(folder)
    engine.stage.catch_up()
    return {name: engine.stage.full_parameter(name) for name in engine.stage.names.values()}


def offloaded(stage: int, optimizer: dict[str, Any], param: dict[str, Any] | None, path: Path) -> dict[str, Any]:
    settings = config(stage, **ADAMW, **AIO)
    zero = settings["zero_optimization"] | {"sub_group_size": 64}
    zero["offload_optimizer"] = optimizer | ({"nvme_path": str(path)} if optimizer["device"] == "nvme" else {})
    if param is not None:
        zero["offload_param"] = {"nvme_path": str(path / "made"), "max_in_cpu": 0} | param
    return settings | {"zero_optimization": zero}


WAYS = {
    "optimizer to the host": (CPU, None),
    "half of the optimizer to a disk": (NVME | {"ratio": 0.5}, None),
    "optimizer to a disk": (NVME | {"pipeline_write": True}, None),
    "all to a disk": (NVME, {"device": "nvme", "buffer_count": 2}),
    "parameters to a disk, optimizer to the host": (CPU, {"device": "nvme"}),
    "parameters alone to a disk": ({"device": "none"}, {"device": "nvme"}),
    "all to the host": (CPU, {"device": "cpu"}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_weights_are_those_without_offload(stage: int, way: str, tmp_path: Path) -> None:
    optimizer, param = WAYS[way]
    if param is not None and stage < 3:
        return
    plain = worlds.run(trained, config(stage, **ADAMW), 4, ranks=2)
    found = worlds.run(trained, offloaded(stage, optimizer, param, tmp_path), 4, ranks=2)
    assert [n for n in plain[0] if not torch.equal(plain[0][n], found[0][n])] == []


@pytest.mark.parametrize(
    ("stage", "way"),
    [
        (1, "half of the optimizer to a disk"),
        (2, "optimizer to a disk"),
        (3, "all to a disk"),
        (3, "parameters to a disk, optimizer to the host"),
    ],
)
def test_a_run_goes_on_from_its_checkpoint(stage: int, way: str, tmp_path: Path) -> None:
    settings = offloaded(stage, *WAYS[way], tmp_path / "disk")
    whole = worlds.run(trained, settings, 4, tmp_path / "saved", ranks=2)[0]
    again = worlds.run(trained, settings, 4, tmp_path / "saved", True, ranks=2)[0]
    assert [n for n in whole if not torch.equal(whole[n], again[n])] == []


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_that_is_one_step_late_goes_on(stage: int, device: str, tmp_path: Path) -> None:
    """A save finishes the update under way."""
    late = (NVME if device == "nvme" else CPU) | {"delayed_update": True}
    settings = offloaded(stage, late, None, tmp_path / "disk")
    whole = worlds.run(trained, settings, 4, tmp_path / "saved", ranks=2)[0]
    again = worlds.run(trained, settings, 4, tmp_path / "saved", True, ranks=2)[0]
    plain = worlds.run(trained, config(stage, **ADAMW), 4, ranks=2)[0]
    assert [n for n in whole if not torch.equal(whole[n], again[n])] == []
    assert [n for n in whole if not torch.equal(whole[n], plain[n])] != []


def without_room(stage: int, which: str, path: Path) -> str:
    """What a rank is told where the last one may make no file, or has no room in it."""
    last = dist.get_rank() == dist.get_world_size() - 1
    settings = offloaded(stage, *WAYS["all to a disk" if which == "parameters" else "optimizer to a disk"], path)
    settings["zero_optimization"]["mics_shard_size"] = 1 if which == "replicas" else -1
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    call, fails = ("opened", [full]) if which == "file" else ("take_space", [*([None] if stage == 3 else []), full])
    with (
        mock.patch.object(blocks, call, side_effect=fails) if last else nullcontext(),
        pytest.raises(OffloadError) as told,
    ):
        refimpl.initialize(model=Net(), config=settings)
    return str(told.value)


@pytest.mark.parametrize(
    ("stage", "which", "ranks"),
    [(1, "file", 3), (2, "states", 3), (3, "states", 2), (3, "parameters", 3), (3, "replicas", 2)],
)
def test_a_disk_that_fails_one_rank_at_the_start_is_told_on_all(
    stage: int, which: str, ranks: int, tmp_path: Path
) -> None:
    texts = worlds.run(without_room, stage, which, tmp_path, ranks=ranks)
    assert len(set(texts)) == 1
    says = "cannot make a file to offload to: .*; give a folder" if which == "file" else "no room for .*; free some"
    assert re.match(rf"rank {ranks - 1}: {tmp_path}.*: {says}", texts[0]), texts[0]


PARAM = {"device": "nvme", "nvme_path": "/tmp", "max_in_cpu": 0}
WRONG = {
    "delayed_update needs device 'cpu' or 'nvme'": (2, {"device": "none", "delayed_update": True}, None),
    "no offload_param: the next step reads parameters": (3, CPU | {"delayed_update": True}, PARAM),
    "offload_optimizer.device = 'nvme' needs a folder: set offload_optimizer.nvme_path": (2, {"device": "nvme"}, None),
    "nvme_path = '/proc/self/comm': File exists; move what is there away": (
        2,
        {"device": "nvme", "nvme_path": "/proc/self/comm"},
        None,
    ),
    "offload_optimizer.nvme_path = '/proc/here': ": (2, {"device": "nvme", "nvme_path": "/proc/here"}, None),
    "and a buffer holds 4: raise buffer_size": (3, CPU, PARAM | {"buffer_size": 1}),
}


def homes_on(device: str, optimizer: dict[str, Any], param: dict[str, Any] | None, path: Path) -> ZeroConfig:
    settings = load_config(offloaded(3, optimizer, param, path), world_size=1)
    return with_homes(ZeroConfig(), settings, torch.device(device), Group(None))


def test_on_a_gpu_a_late_updates_gradients_leave_for_the_host(tmp_path: Path) -> None:
    """Which home is chosen needs no GPU."""
    for optimizer in (CPU, NVME):
        zero = homes_on("cuda", optimizer | {"delayed_update": True}, None, tmp_path)
        assert type(zero.gradient_home) is Host
        assert homes_on("cpu", optimizer | {"delayed_update": True}, None, tmp_path).gradient_home is None
    assert isinstance(homes_on("cuda", NVME, None, tmp_path).gradient_home, Disk)


def test_parameters_leave_a_gpu_for_the_host_or_a_disk(tmp_path: Path) -> None:
    for optimizer in (CPU, {"device": "none"}):
        zero = homes_on("cuda", optimizer, {"device": "cpu"}, tmp_path)
        assert type(zero.parameter_home) is type(zero.optimizer_home) is Host
        assert isinstance(homes_on("cuda", optimizer, {"device": "nvme"}, tmp_path).parameter_home, Disk)
    assert homes_on("cpu", CPU, {"device": "cpu"}, tmp_path).parameter_home is None


def test_what_the_file_says_of_a_disk_reaches_it(tmp_path: Path) -> None:
    for more, buffers in (({}, 2), ({"pipeline_write": True}, 3), ({"pipeline_read": False}, 1)):
        zero = homes_on("cpu", NVME | more, {"device": "nvme", "max_in_cpu": 7}, tmp_path)
        assert isinstance(zero.optimizer_home, Disk)
        assert zero.optimizer_home.buffer_count == buffers  # a part that is read, updated, written: each has its own
        assert zero.optimizer_home.file.aio == Aio(512, 1, 1)  # one request at a time, without overlap_events
        assert (zero.sub_group_size, zero.max_in_host) == (128, 7)  # no part is smaller than a request


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_that_are_whole_stay_as_in_deepspeed_which_a_warning_says(stage: int, tmp_path: Path) -> None:
    with pytest.warns(ConfigWarning, match=f"stage 3 only, not in stage {stage}.*no effect"):
        settings = load_config(offloaded(stage, {"device": "none"}, PARAM, tmp_path), world_size=1)
    assert with_homes(ZeroConfig(), settings, torch.device("cuda"), Group(None)).parameter_home is None
    load_config(offloaded(stage, {"device": "none"}, PARAM, tmp_path), world_size=1, rank=1)


@pytest.mark.parametrize("says", WRONG)
def test_what_cannot_be_is_named(says: str) -> None:
    stage, optimizer, param = WRONG[says]
    settings = config(stage, **ADAMW)
    settings["zero_optimization"] |= {"offload_optimizer": optimizer, "offload_param": param or {"device": "none"}}
    with pytest.raises(RankError) as error:
        worlds.run(trained, settings, 1, ranks=2)
    assert says in str(error.value)
