"""Progressive layer dropping: the share of layers that a step computes falls from all of them to `theta`.

    theta(t) = (1 - theta) exp(-gamma t) + theta

Zhang and He 2020, arXiv:2010.13369. The schedule alone: the model is told theta(t) and drops its layers itself.
DeepSpeed's file: deepspeed/runtime/progressive_layer_drop.py, which it removed in 0.19.8.
"""

import numpy as np


class ProgressiveLayerDrop:
    """`theta` in the end, `gamma` how fast. DeepSpeed's class."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta, self.gamma = theta, gamma
        self.current_theta = 1.0

    def update_state(self, global_step: int) -> None:
        """Go to theta(global_step)."""
        self.current_theta = float((1 - self.theta) * np.exp(-self.gamma * global_step) + self.theta)  # bits as there

    def get_theta(self) -> float:
        return self.current_theta

    def get_state(self) -> dict[str, bool | float]:
        """What a model's forward is told, as keywords."""
        return {"progressive_layer_drop": True, "pld_theta": self.current_theta}
