"""Python's search for garbage in cycles, off from an engine's making to its end: `"disable_python_gc": true`.

Python looks through its objects whenever many have been made, at another moment on each rank, and a collective waits
for the slowest: with N ranks up to N pauses stand in the way of all. Without it what lies in cycles stays, memory of
tensors too: call `engine.collect_python_gc()` on every rank at the same step. An engine that is dropped without
`destroy()` lies in such cycles. A forked process, as a DataLoader's worker, has the collector on.
DeepSpeed: deepspeed/runtime/python_gc.py, since 0.19.8. torchtitan: `gc_freq`.
"""

import gc
import os
import weakref


class Collector:
    """The process's one collector, and which engines want it off."""

    def __init__(self) -> None:
        self.wanted_off: set[object] = set()  # one mark an engine
        self.was_on = False
        os.register_at_fork(after_in_child=self.forget)

    def pause(self, engine: object) -> "weakref.finalize[[object], object]":
        """Collect once, and then not until `engine` is gone, or what this returns is called."""
        if not self.wanted_off:
            self.was_on = gc.isenabled()
            gc.collect()
            gc.disable()
        self.wanted_off.add(mark := object())
        return weakref.finalize(engine, self.resume, mark)

    def resume(self, mark: object) -> None:
        """One engine less; with the last one the collector is what it was. Nothing in a process forked since."""
        if mark in self.wanted_off:
            self.wanted_off.remove(mark)
            if not self.wanted_off and self.was_on:
                gc.enable()

    def forget(self) -> None:
        """In a forked process, where nobody trains with the engines of its parent."""
        for mark in tuple(self.wanted_off):
            self.resume(mark)


COLLECTOR = Collector()
