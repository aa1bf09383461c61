"""Gradient accumulation: how many micro-batches have gone backward, and whether the next `step` updates.

    a micro-batch is    from                 until                                    counted in
    pending             its backward         `step` is called                         `_pending`
    accumulated         that call            a `step` at the boundary takes it        `_accumulated`

The boundary is where both together are gradient_accumulation_steps; a `step` without a backward counts as one.
DeepSpeed counts calls of `step` alone: see `refimpl.engine.engine`.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from refimpl.engine.asked import Asked
from refimpl.engine.build import Parts


class Accumulation(Asked):
    """What an `Engine` counts, and when it reduces."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._boundary: bool | None = None  # what the client said, if it did
        self.scale_wrt_gas: bool | None = None  # what the client wants of every `backward`, over its argument
        self._syncing = True  # False inside no_sync
        self._pending = self._accumulated = 0
        self.stage.gradients.divisor = self._config.gradient_accumulation_steps
        self.stage.on_drop.append(self._forget_micro_batches)

    @property
    def _open_micro_batches(self) -> int:
        """Those since the last update."""
        return self._accumulated + self._pending

    def _count_step(self) -> None:
        """`step` was called."""
        self.micro_steps += max(1, self._pending)
        self._accumulated += max(1, self._pending)
        self._pending = 0

    def _take_micro_batches(self) -> int:
        """For an update: how many were accumulated; none are any more."""
        taken, self._accumulated = self._accumulated, 0
        return taken

    def _forget_micro_batches(self) -> None:
        """Their gradients are gone: the next one begins a batch."""
        self._pending = self._accumulated = 0

    def _drop_batch(self) -> None:
        """Of the batch that was begun nothing is left: the next micro-batch begins one."""
        self._forget_micro_batches()
        self.stage.zero_grad()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way, or about to begin, completes a batch.

        False with `managed_gradient_accumulation` off: then every `step` updates, and none is known beforehand.
        """
        if self._boundary is not None:
            return self._boundary
        if not self._config.managed_gradient_accumulation:
            return False
        return self._accumulated + max(1, self._pending) >= self._config.gradient_accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide from now on what `is_gradient_accumulation_boundary` answers, whatever has been counted.

        RuntimeError with `managed_gradient_accumulation` off.
        """
        if not self._config.managed_gradient_accumulation:
            raise RuntimeError(
                "set_gradient_accumulation_boundary: with managed_gradient_accumulation = false every step() updates: "
                "call step() at the boundary alone, or leave that key out"
            )
        self._boundary = is_boundary

    @property
    def enable_backward_allreduce(self) -> bool:
        """True: gradients are averaged while they come. NotImplementedError when it is set to False."""
        return True

    @enable_backward_allreduce.setter
    def enable_backward_allreduce(self, value: bool) -> None:
        if not value:
            raise NotImplementedError(
                "engine.enable_backward_allreduce = False: not part of this project, a step is always of all ranks' "
                "gradients; engine.no_sync() keeps them on this rank until then, LocalSGD lets ranks train apart"
            )

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """At the accumulation boundary, average now what `no_sync` has kept on this rank; `step` would. A collective.

        All other gradients are averaged while they come. bucket_size: not used, `reduce_bucket_size` is the size.
        """
        if self.is_gradient_accumulation_boundary():
            self.stage.reduce_rest()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on this rank in the block. Stages 2 and 3 hold no whole gradient: RuntimeError.

        Before the boundary of a batch, where accelerate below 1.9 asks for it in every stage, it only warns there: the
        sum is the same. DeepSpeed from 0.16 on refuses that too.
        """
        if (stage := self.zero_optimization_stage()) >= 2:
            why = f"no_sync: ZeRO stage {stage} shards every micro-batch's gradient"
            if self.is_gradient_accumulation_boundary():
                raise RuntimeError(f"{why}; use stage 0 or 1, or let gradient_accumulation_steps count them")
            warnings.warn(f"{why}: it is sent all the same", stacklevel=3)
        with self._without_step(), self.stage.no_sync() if stage < 2 else nullcontext():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """All `backward` calls in the block are of one step, and stage 1 reduces their sum once, in that step.

        Stages 2 and 3 reduce each of them all the same, as they have no memory for whole gradients (DeepSpeed keeps
        them until the block ends). RuntimeError in another such block; NotImplementedError in stage 0, as in DeepSpeed.
        """
        stage = self.zero_optimization_stage()
        if stage == 0:
            raise NotImplementedError("coalesce_grad_reduction: ZeRO stage 0 reduces once a step anyway: use no_sync")
        if not self._syncing:
            raise RuntimeError("coalesce_grad_reduction() inside no_sync() or another one: leave that block first")
        with self._without_step(), self.stage.no_sync() if stage == 1 else nullcontext():
            yield

    @contextmanager
    def _without_step(self) -> Iterator[None]:
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before
