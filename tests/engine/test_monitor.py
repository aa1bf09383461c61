"""Monitors write what they are given, on rank 0, where DeepSpeed writes it."""

import csv
import importlib.util
import resource
import sys
import types
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import worlds
from torch import nn
from torch.optim import SGD

from refimpl import launch
from refimpl.engine.config import load_config
from refimpl.engine.configuration.keys import ConfigError, ConfigWarning
from refimpl.engine.configuration.schema import DeepSpeedConfig
from refimpl.engine.initialize import initialize
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


MISSING = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


@pytest.mark.parametrize("section", MISSING)
def test_not_installed(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning where it would have been written; the other ranks need no such package."""
    pretend(monkeypatch, MISSING[section], installed=False)
    with pytest.warns(ConfigWarning, match=f"{section}.enabled = True: {MISSING[section]} is not installed, nothing"):
        monitor = Monitor(config(section), rank=0)
    assert not monitor.enabled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not Monitor(config(section), rank=1).enabled


@pytest.mark.parametrize("section", ["csv_monitor", "tensorboard"])
def test_a_folder_that_cannot_be_made_is_told_by_its_key(section: str, tmp_path: Path) -> None:
    if section == "tensorboard":
        pytest.importorskip("tensorboard")
    (tmp_path / "taken").touch()
    said = rf"set {section}\.output_path to a folder .* or take {section} out: .*taken/job'"
    with pytest.raises(OSError, match=said):
        Monitor(config(section, output_path=str(tmp_path / "taken"), job_name="job"), rank=0)


def start_in(folder: Path) -> str:
    asked = {"train_batch_size": 2, "csv_monitor": {"enabled": True, "output_path": str(folder)}}
    with pytest.raises(ConfigError) as error:
        initialize(model=nn.Linear(2, 2), optimizer=partial(SGD, lr=0.1), config=asked)
    return str(error.value)


def test_all_ranks_hear_of_such_a_folder(tmp_path: Path) -> None:
    """Only rank 0 writes; the others would wait for it."""
    (tmp_path / "taken").touch()
    first, second = worlds.run(start_in, tmp_path / "taken", ranks=2)
    assert "rank 0: NotADirectoryError" in first
    assert "set csv_monitor.output_path to a folder" in second


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


COMET = """
calls = []

class Experiment:
    def set_name(self, name):
        calls.append(("name", name))

    def log_metric(self, name, value, step):
        calls.append((name, value, step))

    def end(self):
        calls.append("end")

def start(**options):
    calls.append(options)
    return Experiment()
"""


@pytest.fixture
def comet_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is called of a comet_ml that only writes down."""
    (tmp_path / "comet_ml.py").write_text(COMET)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("comet_ml").calls
    del sys.modules["comet_ml"]


def test_comet(comet_calls: list[Any]) -> None:
    """The first value of each name, then one whenever so many samples have passed since its last."""
    of_start = {"project": "p", "workspace": "w", "api_key": "k", "experiment_key": "x", "online": False, "mode": "get"}
    monitor = Monitor(config("comet", samples_log_interval=10, experiment_name="mine", **of_start), rank=0)
    for step in (4, 8, 14, 23, 24):
        monitor.write([("Train/Samples/lr", 0.5, step)])
    monitor.write([("late", 1.0, 25)])
    monitor.close()
    logged = [("Train/Samples/lr", 0.5, step) for step in (4, 14, 24)]
    assert comet_calls == [of_start, ("name", "mine"), *logged, ("late", 1.0, 25), "end"]


def test_comet_by_its_own_settings(comet_calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """What is left out is Comet's to find; a key to the account is not printed."""
    Monitor(config("comet"), rank=0)
    nothing = dict.fromkeys(("project", "workspace", "api_key", "experiment_key", "online", "mode"))
    assert comet_calls == [nothing]
    asked = {"train_batch_size": 1, "dump_state": True, "comet": {"api_key": "secret", "project": "mine"}}
    initialize(model=nn.Linear(2, 2), optimizer=partial(SGD, lr=0.1), config=asked)
    printed = capsys.readouterr().out
    assert "mine" in printed
    assert "secret" not in printed


def test_wrong_values_for_comet_are_named() -> None:
    for key, value in {"mode": "got", "samples_log_interval": -1, "projekt": "p"}.items():
        with pytest.raises(ConfigError, match=rf"comet\.{key}"):
            config("comet", **{key: value})
