"""Python's search for garbage in cycles, off from an engine's making to its end: `"disable_python_gc": true`.

Python looks through its objects whenever many have been made, at another moment on each rank, and a collective waits
for the slowest: with N ranks up to N pauses stand in the way of all. Without it what lies in cycles stays, memory of
tensors too: call `engine.collect_python_gc()` on every rank at the same step.
DeepSpeed: deepspeed/runtime/python_gc.py, since 0.19.8. torchtitan: `gc_freq`.
"""

import gc
import weakref


class Collector:
    """The process's one collector, and how many engines want it off."""

    def __init__(self) -> None:
        self.engines = 0
        self.was_on = False

    def pause(self, engine: object) -> "weakref.finalize[[], object]":
        """Collect once, and then not until `engine` is gone, or what this returns is called."""
        if not self.engines:
            self.was_on = gc.isenabled()
            gc.collect()
            gc.disable()
        self.engines += 1
        return weakref.finalize(engine, self.resume)

    def resume(self) -> None:
        """One engine less; with the last one the collector is what it was."""
        self.engines -= 1
        if not self.engines and self.was_on:
            gc.enable()


COLLECTOR = Collector()
