"""The engine of a pipeline under DualPipeV: a `PipelineEngine` for which a step has two micro-batches a stage's rank.

With fewer the pattern never comes to its pairs, and its authors, torch and DeepSpeed all refuse it. That is asked of a
step, here as there; an evaluation may have any number. What DeepSpeed's refuses besides (shapes that change, tensors of
booleans) the runner has for every schedule.
DeepSpeed: deepspeed/runtime/pipe/dualpipev.py.
"""

from refimpl.engine.build import Parts
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.pipeline import PipelineEngine


class DualPipeVEngine(PipelineEngine):
    """Trains a PipelineModule whose schedule is "dualpipe-v". Made by `initialize`, on every rank alike."""

    def __init__(self, parts: Parts) -> None:
        """ConfigError for fewer than 2p micro-batches a step."""
        super().__init__(parts)
        self._enough(self.gradient_accumulation_steps())

    def _set_sizes(self, micro: int, steps: int) -> None:
        self._enough(steps)
        super()._set_sizes(micro, steps)

    def _enough(self, steps: int) -> None:
        if steps < (least := 2 * self.num_stages):
            raise ConfigError(
                f"rank {self.axes.world.rank}: gradient_accumulation_steps = {steps}: DualPipeV over {self.num_stages} "
                f"ranks needs {least} micro-batches at least: raise it, or use PipelineModule, whose 1F1B takes any "
                "number"
            )
