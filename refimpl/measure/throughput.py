"""Samples a second: the time from a micro-batch's forward to the end of its step, without what lies between them.

Loading data and evaluating are not counted, nor are the first steps, which warm up. On CUDA the host only queues work:
the figure is that of the queue, which over many steps is the device's. DeepSpeed: ThroughputTimer in utils/timer.py.
"""

import time


class ThroughputTimer:
    """`start` before a micro-batch, `stop` after its step, with the samples of the batch when the step has updated."""

    def __init__(self, start_step: int = 2) -> None:
        """`start_step`: how many updates are warm-up."""
        self.start_step = start_step
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = 0.0  # seconds, after the warm-up
        self._samples = 0  # in that time
        self._begun: float | None = None

    def update_epoch_count(self) -> None:
        """An epoch is over: micro-steps are counted anew."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """A micro-batch begins."""
        self._begun = time.perf_counter()

    def stop(self, samples: int = 0) -> None:
        """It is through; `samples` of all ranks were in the update, 0: there was none. Nothing before a `start`."""
        if self._begun is None:
            return
        if self.global_step_count >= self.start_step:
            self.total_elapsed_time += time.perf_counter() - self._begun
            self._samples += samples
        self.micro_step_count += 1
        self.global_step_count += samples > 0
        self._begun = None

    def avg_samples_per_sec(self) -> float:
        """Of all ranks together; -inf before the first update after the warm-up."""
        return self._samples / self.total_elapsed_time if self._samples else float("-inf")
