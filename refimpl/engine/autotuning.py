"""`autotuning`: a script is tried in several configurations, and each trial ends by itself when its steps are timed.

`refimpl deepspeed --autotuning tune script.py ...` (`refimpl.bench.autotune`) runs the script again and again, each
time with another file: this section then has a `metric_path`, and the engine writes there how fast it was from the end
of step `start_profile_step` to the end of step `end_profile_step`, and ends the process. Without that path nothing is
done. DeepSpeed's files: deepspeed/autotuning/config.py, runtime/engine.py (_autotuning_exit).
"""

import json
import warnings
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import BeforeValidator, Field, model_validator

from refimpl.engine.configuration.keys import ConfigWarning
from refimpl.engine.configuration.values import Positive, Section, lower
from refimpl.measure.clock import now


class Autotuning(Section):
    """What is tried, and how it is measured."""

    enabled: bool = Field(default=False, description="read by `refimpl deepspeed --autotuning`; else without effect")
    metric: Annotated[Literal["throughput", "latency", "flops"], BeforeValidator(lower)] = Field(
        default="throughput", description="what is best; flops: of one model, the same as throughput"
    )
    start_profile_step: Positive = Field(default=3, description="the clock starts behind this step")
    end_profile_step: Positive = Field(default=5, description="and stops behind this one")
    metric_path: str | None = Field(default=None, description="where a trial writes its time; then it ends")
    arg_mappings: dict[str, str] | None = Field(
        default=None, description="keys of the file -> options of the script that say the same"
    )
    results_dir: str | None = Field(default=None, description="a folder for each trial; unset: autotuning_results")
    overwrite: bool = Field(default=False, description="try again what has a result there")
    min_train_micro_batch_size_per_gpu: Positive = Field(default=1, description="no smaller micro-batch is tried")
    max_train_micro_batch_size_per_gpu: Positive | None = Field(default=None, description="nor a larger one")
    max_train_batch_size: Positive | None = Field(default=None, description="no larger batch over all ranks")
    tuner_early_stopping: Positive = Field(default=5, description="end behind so many trials that are no better")
    tuner_num_trials: Positive = Field(default=50, description="trials at most")

    @model_validator(mode="after")
    def check_steps(self) -> Self:
        if self.end_profile_step <= self.start_profile_step:
            raise ValueError(
                f"end_profile_step {self.end_profile_step} must be larger than start_profile_step "
                f"{self.start_profile_step}: no step would be timed"
            )
        return self


class Trial:
    """The engine's part of a trial."""

    def __init__(self, config: Autotuning, device: torch.device, rank: int) -> None:
        self.config, self.device, self.rank = config, device, rank
        self.path = Path(config.metric_path) if config.enabled and config.metric_path else None
        if config.enabled and self.path is None and rank == 0:
            start = "`refimpl deepspeed --autotuning tune SCRIPT` (or run)"
            warnings.warn(f"autotuning.enabled: without effect, unless started by {start}", ConfigWarning, stacklevel=4)
        self.began = (0.0, 0)

    def after_update(self, step: int, samples: int) -> None:
        """Behind update `step`, with `samples` since training began. SystemExit(0) when all is measured."""
        if self.path is None:
            return
        if step == self.config.start_profile_step:
            self.began = now(self.device), samples
        if step == self.config.end_profile_step:
            seconds = now(self.device) - self.began[0]
            steps = step - self.config.start_profile_step
            if self.rank == 0:
                found = {"throughput": (samples - self.began[1]) / seconds, "latency": 1e3 * seconds / steps}
                part = self.path.with_suffix(".part")  # whoever reads the file finds all of it
                part.write_text(json.dumps(found), encoding="utf-8")
                part.replace(self.path)
            raise SystemExit(0)
