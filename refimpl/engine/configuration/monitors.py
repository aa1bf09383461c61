"""Where metrics go: CSV files, TensorBoard, Weights & Biases, Comet, one pydantic model a section.

See `sections.py` for what a field is. DeepSpeed: deepspeed/monitor/config.py.
"""

from typing import Literal

from pydantic import Field

from refimpl.engine.configuration.values import Count, Section


class CSVMonitor(Section):
    """One CSV file a metric."""

    enabled: bool = Field(default=False, description="rank 0 writes one CSV file a metric")
    output_path: str = Field(default="", description="folder; empty means the working directory")
    job_name: str = Field(default="DeepSpeedJobName", description="folder inside output_path")


class TensorBoard(Section):
    """TensorBoard event files."""

    enabled: bool = Field(default=False, description="rank 0 writes event files; a warning when it is not installed")
    output_path: str = Field(default="", description="folder; empty means the working directory")
    job_name: str = Field(default="DeepSpeedJobName", description="folder inside output_path")


class WandB(Section):
    """Weights & Biases."""

    enabled: bool = Field(
        default=False, description="rank 0 logs to Weights & Biases; a warning when it is not installed"
    )
    group: str | None = Field(default=None, description="name of the run's group")
    team: str | None = Field(default=None, description="the entity that owns the run")
    project: str = Field(default="deepspeed", description="name of the project")


class Comet(Section):
    """Comet; what is left out is read from its own file, .comet.config, or COMET_API_KEY and the like."""

    enabled: bool = Field(default=False, description="rank 0 logs to Comet; a warning when it is not installed")
    samples_log_interval: Count = Field(default=100, description="samples between two values of a metric, at least")
    project: str | None = Field(default=None, description="name of the project")
    workspace: str | None = Field(default=None, description="name of the workspace")
    api_key: str | None = Field(default=None, description="the key to the account; `dump_state` does not print it")
    experiment_name: str | None = Field(default=None, description="what the experiment is called")
    experiment_key: str | None = Field(default=None, description="of the experiment to go on with, or to make")
    online: bool | None = Field(default=None, description="false: kept in a local file; unset: sent")
    mode: Literal["get", "create", "get_or_create"] | None = Field(
        default=None, description="whether the experiment is there already; unset: as get_or_create"
    )


class Monitors(Section):
    """All places that metrics go to. No section of the file: its parts are, each by itself."""

    tensorboard: TensorBoard = Field(default_factory=TensorBoard, description="metrics for TensorBoard")
    wandb: WandB = Field(default_factory=WandB, description="metrics for Weights & Biases")
    csv_monitor: CSVMonitor = Field(default_factory=CSVMonitor, description="metrics as CSV files")
    comet: Comet = Field(default_factory=Comet, description="metrics for Comet")

    @property
    def enabled(self) -> bool:
        return self.tensorboard.enabled or self.wandb.enabled or self.csv_monitor.enabled or self.comet.enabled
