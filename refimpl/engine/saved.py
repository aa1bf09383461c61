"""Checkpoints as an engine's calls: what they promise. How each is done: checkpoint.py and resume.py beside this file.

DeepSpeed's file: deepspeed/runtime/engine.py, `save_checkpoint`, `load_checkpoint`.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from refimpl.engine import checkpoint, resume
from refimpl.engine.accumulation import Accumulation
from refimpl.engine.saving.small_states import Wanted


class Saved(Accumulation):
    """What an `Engine` saves and goes on from."""

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | float | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        asynchronous: bool | None = None,
    ) -> bool:
        """Write everything that `load_checkpoint` needs to go on. Every rank must call it. Returns True.

        A checkpoint of the same tag is replaced, at once, when all of the new one is on the disk. asynchronous (None:
        as checkpoint.writer.decoupled says): return when all is copied; what fails behind is raised by the next
        `step`, `save_checkpoint`, `load_checkpoint` or `wait_for_checkpoint`. Gradients that wait for an update are not
        saved, which a warning says: who goes on from there begins the batch anew, with the data that follows. (In
        DeepSpeed, with those of its micro-batches that are left.)
        """
        open_ = self._open_micro_batches
        if open_ and self.stage.gradients.used and self.group.rank == 0:  # they are not, after optimizer.step() by hand
            warnings.warn(
                f"save_checkpoint: {open_} micro-batch(es) since the last update: their gradients are not saved; save "
                "after a step that updates",
                stacklevel=2,
            )
        behind = self._config.checkpoint.writer.decoupled if asynchronous is None else asynchronous
        state = client_state or {}
        return checkpoint.save(self, save_dir, tag, state, save_latest, exclude_frozen_parameters, behind)

    def wait_for_checkpoint(self) -> None:
        """Return when an asynchronous save is whole on the disk and `latest` names it. Every rank must call it.

        CheckpointError on every rank if it has failed on one.
        """
        checkpoint.wait(self)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | float | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., object] | None = None,
        load_random_states: bool = True,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint: its path and this rank's client_state, or (None, None) if there is no `latest`.

        From any stage, world size, bucket size and dtype to any other. load_module_only: the weights and nothing else;
        load_optimizer_states=False: all but the optimizer; custom_load_fn(src=weights by name, dst=module) then may do
        it. load_module_strict=False: weights that only one side has stay as they are. load_random_states=False, or what
        transformers' Trainer saved, which puts them back itself: torch, Python and numpy draw on from here. Gradients
        that wait here for an update are dropped. CheckpointError on every rank, the engine unchanged, if the checkpoint
        is damaged or does not fit.
        """
        wanted = Wanted(
            load_module_strict, load_optimizer_states, load_lr_scheduler_states,
            load_module_only, custom_load_fn, load_random_states,
        )  # fmt: skip
        path, client_state = resume.load(self, Path(load_dir), tag, wanted)
        if path is not None:
            self._drop_batch()
        return path, client_state
