"""Metrics as they happen, written by rank 0: CSV files, TensorBoard event files, Weights & Biases, Comet.

An event is (name, value, step): ("Train/Samples/train_loss", 2.31, 4096). DeepSpeed's files: deepspeed/monitor/.
"""

import csv
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from refimpl.engine.configuration.keys import ConfigWarning
from refimpl.engine.configuration.monitors import Comet, Monitors
from refimpl.engine.configuration.schema import DeepSpeedConfig

Event = tuple[str, float, int]  # name, value, step


class Writer(Protocol):
    """One place that events go to."""

    def write(self, events: list[Event]) -> None:
        """Write all of `events`, so that they can be seen at once."""

    def close(self) -> None:
        """Release files and connections."""


@contextmanager
def telling(section: str, path: Path) -> Iterator[None]:
    """An OSError of the block, of `path` and with what to do: a full disk shows in a `close` or a thread, unnamed."""
    try:
        yield
    except OSError as error:
        remedy = f"set {section}.output_path to a folder with room that can be written, or take {section} out"
        raise OSError(error.errno, f"{error.strerror}; {remedy}", str(path)) from error


class CSVWriter:
    """One file a metric: <output_path>/<job_name>/Train_Samples_lr.csv with the columns step and lr.

    Rows of a later run are appended under the same header; DeepSpeed writes a second header between them.
    """

    def __init__(self, folder: Path) -> None:
        """OSError names the key if the folder cannot be made."""
        self.folder = folder
        with telling("csv_monitor", folder):
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, events: list[Event]) -> None:
        """Append one row an event. OSError names the file."""
        for name, value, step in events:
            path = self.folder / (name.replace("/", "_").replace(" ", "_") + ".csv")
            with telling("csv_monitor", path), path.open("a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if file.tell() == 0:
                    rows.writerow(["step", name.rsplit("/", 1)[-1]])
                rows.writerow([step, value])

    def close(self) -> None:
        """Every write has closed its file."""


class TensorBoardWriter:
    """Event files in <output_path>/<job_name>, for `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        """OSError names the key if the folder cannot be made, or written."""
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        with telling("tensorboard", folder):
            self.writer: Any = SummaryWriter(log_dir=str(folder))

    def write(self, events: list[Event]) -> None:
        """Add one scalar an event. OSError names the folder."""
        with telling("tensorboard", self.folder):
            for name, value, step in events:
                self.writer.add_scalar(name, value, step)
            self.writer.flush()

    def close(self) -> None:
        """End the event file."""
        self.writer.close()


class WandBWriter:
    """A Weights & Biases run."""

    def __init__(self, project: str, group: str | None, team: str | None) -> None:
        wandb = importlib.import_module("wandb")
        self.run: Any = wandb.init(project=project, group=group, entity=team)

    def write(self, events: list[Event]) -> None:
        """Log one value an event, at its step."""
        for name, value, step in events:
            self.run.log({name: value}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


class CometWriter:
    """A Comet experiment: of each metric the first value, then one every `samples_log_interval` samples."""

    def __init__(self, asked: Comet) -> None:
        self.interval = asked.samples_log_interval
        self.logged: dict[str, int] = {}  # the step of each name's last value
        self.experiment: Any = importlib.import_module("comet_ml").start(
            api_key=asked.api_key,
            project=asked.project,
            workspace=asked.workspace,
            experiment_key=asked.experiment_key,
            mode=asked.mode,
            online=asked.online,
        )
        if asked.experiment_name is not None:
            self.experiment.set_name(asked.experiment_name)

    def write(self, events: list[Event]) -> None:
        """Log what is due, at its step."""
        for name, value, step in events:
            if name not in self.logged or step - self.logged[name] >= self.interval:
                self.logged[name] = step
                self.experiment.log_metric(name, value, step=step)

    def close(self) -> None:
        """End the experiment, when all has been sent."""
        self.experiment.end()


def installed(section: str, package: str) -> bool:
    """Whether it is; a `ConfigWarning` if not: a run can do without."""
    if importlib.util.find_spec(package) is not None:
        return True
    said = f"{section}.enabled = True: {package} is not installed, nothing is logged there; pip install {package}"
    warnings.warn(said, ConfigWarning, stacklevel=3)
    return False


class Monitor:
    """All monitors that the configuration enables; on other ranks than 0 there are none and `write` does nothing.

    Warns (`ConfigWarning`) for one whose package is not installed. OSError names the key of a folder that cannot be
    written.
    """

    def __init__(self, config: DeepSpeedConfig | Monitors, rank: int) -> None:
        self.writers: list[Writer] = []
        if rank != 0:
            return
        if (files := config.csv_monitor).enabled:
            self.writers.append(CSVWriter(Path(files.output_path, files.job_name)))
        if (board := config.tensorboard).enabled and installed("tensorboard", "tensorboard"):
            self.writers.append(TensorBoardWriter(Path(board.output_path, board.job_name)))
        if (wandb := config.wandb).enabled and installed("wandb", "wandb"):
            self.writers.append(WandBWriter(wandb.project, wandb.group, wandb.team))
        if config.comet.enabled and installed("comet", "comet_ml"):
            self.writers.append(CometWriter(config.comet))

    @property
    def enabled(self) -> bool:
        """Whether this rank writes anywhere; compute events only if it does."""
        return bool(self.writers)

    def write(self, events: list[Event]) -> None:
        """Write `events` everywhere."""
        for writer in self.writers:
            writer.write(events)

    write_events = write  # DeepSpeed's name, for what a script logs by itself: engine.monitor.write_events([...])

    def close(self) -> None:
        """Close all monitors."""
        for writer in self.writers:
            writer.close()
        self.writers = []
