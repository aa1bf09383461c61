"""Metrics as they happen, written by rank 0: CSV files, TensorBoard event files, Weights & Biases.

An event is (name, value, step): ("Train/Samples/train_loss", 2.31, 4096). DeepSpeed's files: deepspeed/monitor/.
"""

import csv
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from refimpl.engine.configuration.keys import ConfigError, ConfigWarning
from refimpl.engine.configuration.schema import DeepSpeedConfig
from refimpl.engine.configuration.sections import Monitors

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
        remedy = f"set {section}.output_path to a folder with room, or take {section} out"
        raise OSError(error.errno, f"{error.strerror}; {remedy}", str(path)) from error


class CSVWriter:
    """One file a metric: <output_path>/<job_name>/Train_Samples_lr.csv with the columns step and lr.

    Rows of a later run are appended under the same header; DeepSpeed writes a second header between them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
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


class Monitor:
    """All monitors that the configuration enables; on other ranks than 0 there are none and `write` does nothing.

    Raises `ConfigError` when TensorBoard is asked for and not installed; warns (`ConfigWarning`) for Weights & Biases,
    which a run can do without.
    """

    def __init__(self, config: DeepSpeedConfig | Monitors, rank: int) -> None:
        self.writers: list[Writer] = []
        if config.tensorboard.enabled and importlib.util.find_spec("tensorboard") is None:  # before ranks part
            raise ConfigError("tensorboard.enabled = True: tensorboard is not installed; pip install tensorboard")
        if rank != 0:
            return
        if config.csv_monitor.enabled:
            self.writers.append(CSVWriter(Path(config.csv_monitor.output_path, config.csv_monitor.job_name)))
        if config.tensorboard.enabled:
            self.writers.append(TensorBoardWriter(Path(config.tensorboard.output_path, config.tensorboard.job_name)))
        if config.wandb.enabled:
            if importlib.util.find_spec("wandb") is None:
                warnings.warn(
                    "wandb.enabled = True: wandb is not installed, nothing is logged", ConfigWarning, stacklevel=2
                )
            else:
                self.writers.append(WandBWriter(config.wandb.project, config.wandb.group, config.wandb.team))

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
