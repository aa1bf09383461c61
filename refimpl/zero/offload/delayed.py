"""One step late: the update of a step's gradients runs in a thread while the next forward and backward do.

    main thread   | step t: publish t - 1, start t | forward, backward t + 1 | step: publish t, start t + 1 | ...
    this thread                                    | update t ...          |                              | ...

So the gradients of step t + 1 are those of weights that lack the update of step t: w(t+1) = w(t) - f(gradient at
w(t-1)). The disk's or the host's time hides behind the device's, for 4 bytes a parameter of gradients that must stay
and 4 of new weights that wait (2 and 2 in bf16), divided by N, and for what the delay costs in loss.
On a GPU the thread has a stream of its own: each copy that it waits for would else wait for the forward and backward
that are queued before it. With gradient_home = Host() the gradients wait in the host's memory. On a disk neither they
nor the parameters can: the next step would write over what the update under way reads, or read what it writes.
ZeRO-Offload: Ren et al. 2021, arXiv:2101.06840, section 5.2, which begins with it after 40 steps. DeepSpeed has it in
deepspeed/runtime/zenflow and deepspeed/runtime/superoffload, each with more than this.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from refimpl.checkpoint.background import Background
from refimpl.zero.flat import Bucket
from refimpl.zero.offload.offloaded import Handed, OffloadedUpdate
from refimpl.zero.offload.parts import Part


class DelayedUpdate(OffloadedUpdate):
    """As `OffloadedUpdate`, but what `apply` starts is published by the next one, or by `catch_up`."""

    def __init__(self, *args: Any) -> None:
        self.behind = Background()
        self.used: dict[Bucket, Handed] = {}  # the gradients of the update under way
        self.fresh: dict[Bucket, Tensor] = {}  # what it has rounded of the weights, in the model's dtype
        super().__init__(*args)
        self.beside = self.group.streams.new()

    def add(self, owned: dict[Bucket, Tensor]) -> None:
        self.refuse_under_way()
        super().add(owned)

    @torch.no_grad()
    def apply(self, closure: Callable[[], Any] | None = None) -> None:
        """Publish the update before, and start this one with the settings (learning rates) of now."""
        self.catch_up()
        self.check(closure)
        self.look()
        self.used = {bucket: (grad.clone(), factor, alone) for bucket, (grad, factor, alone) in self.handed.items()}
        for bucket in self.used.keys() - self.fresh.keys():
            self.fresh[bucket] = torch.empty_like(self.owned[bucket])
        used, settings, threads = self.used, self.slices.settings(), torch.get_num_threads()
        streams = self.group.streams
        asked = streams.record()

        def update() -> None:
            torch.set_num_threads(threads)
            with streams.use(self.beside):
                streams.wait(asked)
                self.update_parts(used, settings)

        self.behind.start(update, "delayed update")

    def catch_up(self) -> bool:
        """Wait for the update under way and publish it on this rank; whether there was one. Raises what it raised."""
        used = self.used
        try:
            if used:
                self.on_every_rank(self.behind.wait)
                self.slices.keep_settings()
        finally:
            self.used = {}
        if self.torn:
            return False
        for bucket in used:
            self.owned[bucket].copy_(self.fresh[bucket])
        return bool(used)

    def refuse_torn(self) -> None:
        """What is under way has not been interrupted: `catch_up` raises it if it is."""
        if not self.used:
            super().refuse_torn()

    def round(self, part: Part) -> None:
        """Inside the update: to where it waits for the next step."""
        if not self.used:
            super().round(part)
            return
        self.fresh[part.bucket][part.start : part.end] = part.weights

    def release(self) -> None:
        """Nothing: the update under way needs its gradients."""

    def waiting(self) -> list[Tensor]:
        return [*(grad for grad, _, _ in self.used.values()), *self.fresh.values()]

    def _parts(self, bucket: Bucket, start: float = 0, end: float = torch.inf) -> list[Part]:
        self.refuse_under_way()
        return super()._parts(bucket, start, end)

    def refuse_under_way(self) -> None:
        """RuntimeError while an update is."""
        if self.used:
            raise RuntimeError(
                "delayed_update: the last step's update is still under way: call stage.catch_up() on every rank before "
                "you look at or change weights and optimizer state"
            )
