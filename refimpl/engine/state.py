"""What an engine trains and how far it has come: all that a checkpoint saves and restores.

`Engine` is one and adds the calls; what only looks at it or saves it (checkpoint, resume, weights, the questions of
`Asked`) needs no more than this, and so knows nothing of the engine.
"""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from refimpl.comm.group import Group
from refimpl.engine.build import Parts


class TrainingState(nn.Module):
    """`global_steps` counts optimizer steps (skipped ones too), `micro_steps` micro-batches, `global_samples` samples
    over all ranks, `stage.skipped_steps` updates skipped for a gradient that was not finite."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.module, self.config, self.stage = parts.model, parts.config, parts.stage
        self.group: Group = parts.group
        self.lr_scheduler: Any | None = parts.scheduler
        self.global_steps = self.micro_steps = self.global_samples = 0

    @property
    def optimizer(self) -> Optimizer | None:
        """The torch optimizer; its parameters are this rank's fp32 shards. None in an engine for inference."""
        return self.stage.update.slices.optimizer
