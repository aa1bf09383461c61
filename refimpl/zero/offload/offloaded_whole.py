"""The update in the host's memory of an optimizer that asks about whole parameters: one step for all parts.

LAMB wants norms of what lies across parts and ranks, Muon whole matrices: neither can be updated part by part. So all
gradients of this rank's shard are widened at once: beside a bf16 model 4 bytes a parameter of host memory, divided by
N, for the time of a step. Momentum is averaged on the host's cores; a matrix is made orthogonal on the device, to which
2 bytes an element of it travel, and 2 of the rank's part back (`WholeMatrices`).
DeepSpeed brings Muon's gradients and momenta together on the host or the device: deepspeed/runtime/zero/
stage_1_and_2.py, `_apply_muon_updates_cpu_offload`.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from refimpl.offload.homes import Disk
from refimpl.zero.offload.offloaded import OffloadedUpdate
from refimpl.zero.optimizer.kind import Kind
from refimpl.zero.update import Update


class OffloadedWhole(OffloadedUpdate):
    """As `OffloadedUpdate`; no disk."""

    @property
    def most(self) -> int:
        """All of a bucket is one part: a cut would go through a parameter."""
        return sys.maxsize

    def refuse(self, kind: Kind) -> None:
        """TypeError for a disk, and for an update beside forward and backward, which send too."""
        if isinstance(self.home, Disk):
            raise TypeError(
                f"{kind.name} asks about whole parameters, and a disk brings parts: let it rest in the host's memory, "
                'optimizer_home=Host() (offload_optimizer: {"device": "cpu"})'
            )
        if self.config.delayed_update:
            raise TypeError(f"{kind.name} sends in its step, which cannot be late: leave delayed_update out")

    @torch.no_grad()
    def apply(self, closure: Callable[[], Any] | None = None) -> Any:
        self.check(closure)
        parts = [part for part in self.parts if part.bucket in self.handed]
        with self.all_or_torn():
            for part in parts:
                self.follow(part)
            for bucket, (grad, factor, left_alone) in self.handed.items():
                self.slices.hand_out(bucket, grad, factor, left_alone, 0, grad.numel())
            Update.apply(self)
            for part in parts:
                self.round(part)
        self.handed = {}
