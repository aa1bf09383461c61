"""Monitors write what they are given, on rank 0, where DeepSpeed writes it."""

import csv
import importlib.util
import resource
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from refimpl import launch
from refimpl.engine.config import load_config
from refimpl.engine.configuration.keys import ConfigError, ConfigWarning
from refimpl.engine.configuration.schema import DeepSpeedConfig
from refimpl.engine.monitor import Monitor

EVENTS = [("Train/Samples/train_loss", 2.5, 8), ("Train/Samples/lr", 1e-3, 8)]


def config(name: str, **options: Any) -> DeepSpeedConfig:
    return load_config({"train_batch_size": 1, name: {"enabled": True, **options}}, world_size=1)


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, installed: bool) -> None:
    """Make `name` look installed or not, whatever this machine has."""
    real = importlib.util.find_spec
    spec = types.SimpleNamespace() if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked, *rest: spec if asked == name else real(asked, *rest))


def test_csv_one_file_a_metric(tmp_path: Path) -> None:
    asked = config("csv_monitor", output_path=str(tmp_path), job_name="job")
    monitor = Monitor(asked, rank=0)
    monitor.write(EVENTS)
    monitor.write([("Train/Samples/train_loss", 2.25, 16)])
    Monitor(asked, rank=0).write([("Train/Samples/train_loss", 2.0, 24)])  # a run that was resumed
    assert {path.name for path in (tmp_path / "job").iterdir()} == {
        "Train_Samples_train_loss.csv",
        "Train_Samples_lr.csv",
    }
    with (tmp_path / "job" / "Train_Samples_train_loss.csv").open() as file:
        assert list(csv.reader(file)) == [["step", "train_loss"], ["8", "2.5"], ["16", "2.25"], ["24", "2.0"]]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full: it is Linux's")
def test_a_full_disk_is_told_with_the_file_and_what_to_do(tmp_path: Path) -> None:
    monitor = Monitor(config("csv_monitor", output_path=str(tmp_path), job_name="job"), rank=0)
    (tmp_path / "job" / "Train_lr.csv").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device; set csv_monitor.output_path .*Train_lr\.csv"):
        monitor.write([("Train/lr", 0.1, 1)])


def full(folder: Path) -> None:
    monitor = Monitor(config("tensorboard", output_path=str(folder), job_name="job"), rank=0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match=r"File too large; set tensorboard.output_path to a folder with room.*job'"):
        monitor.write(EVENTS * 9)


def test_a_full_disk_is_told_by_tensorboard_too(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    launch.run(full, tmp_path, ranks=1)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    monitor = Monitor(config("csv_monitor", output_path=str(tmp_path / "logs")), rank=1)
    monitor.write(EVENTS)
    assert not monitor.enabled
    assert list(tmp_path.iterdir()) == []


def test_nothing_asked_nothing_written() -> None:
    assert not Monitor(load_config({"train_batch_size": 1}, world_size=1), rank=0).enabled


def test_tensorboard_can_be_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = Monitor(config("tensorboard", output_path=str(tmp_path), job_name="job"), rank=0)
    monitor.write(EVENTS)
    read = EventAccumulator(str(tmp_path / "job")).Reload()  # at once, not when it is closed
    [scalar] = read.Scalars("Train/Samples/train_loss")
    assert (scalar.step, scalar.value) == (8, 2.5)
    monitor.close()


@pytest.mark.parametrize("rank", [0, 1])  # all of them, or the others would wait for rank 0
def test_tensorboard_not_installed(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "tensorboard", installed=False)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        Monitor(config("tensorboard", output_path=str(tmp_path)), rank)


def test_wandb_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "wandb", installed=False)
    with pytest.warns(ConfigWarning, match="wandb is not installed"):
        monitor = Monitor(config("wandb"), rank=0)
    assert not monitor.enabled


def test_wandb_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((values, step)), finish=lambda: calls.append("end")
    )
    module = types.ModuleType("wandb")
    module.init = lambda **options: calls.append(options) or run  # type: ignore[attr-defined]
    pretend(monkeypatch, "wandb", installed=True)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monitor = Monitor(config("wandb", project="p", team="t", group="g"), rank=0)
    monitor.write(EVENTS[:1])
    monitor.close()
    assert calls == [{"project": "p", "group": "g", "entity": "t"}, ({"Train/Samples/train_loss": 2.5}, 8), "end"]
