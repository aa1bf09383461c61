"""Buffers that training changes, such as BatchNorm's running means: rank 0's on every rank, before each forward.

Each rank sees its own samples, so the ranks' running means drift apart, and with them what evaluation says. Only
floating-point buffers that are saved with the model travel, all of one dtype in one message; positions and masks
(`persistent=False`) never change. As torch's DDP with `broadcast_buffers`; DeepSpeed lets them drift. torch's
SyncBatchNorm makes them equal by itself, on GPUs (it refuses a CPU).

The graph of a forward before may wait for its backward, with buffers in it: constants that something was multiplied by,
and BatchNorm's always. What is written over them is what they hold already, or running means, which BatchNorm itself
writes unseen by autograd: so does `share`. (torch's DDP ends there in "modified by an inplace operation", on every rank
but the first.) Where the model's own code has written to a buffer since, autograd sees this write as it saw that one.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from refimpl.comm.group import Group


class Buffers:
    """`share()` before a training forward."""

    def __init__(self, model: nn.Module, group: Group, enabled: bool, left_out: Collection[nn.Module] = ()) -> None:
        self.group, self.across = group, Group(None, device=group.device)
        saved = [
            (module, name)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if module not in left_out and buffer.is_floating_point() and name not in module._non_persistent_buffers_set
        ]
        self.shared = saved if enabled else []
        self.seen = WeakIdKeyDictionary()  # buffer -> its version when it was last written here

    @torch.no_grad()
    def share(self, training: bool) -> None:
        """Rank 0's buffers to every rank; nothing unless `training`: in evaluation a rank may run forward alone."""
        if not training or self.group.size == self.across.size == 1:
            return
        # Forward may reassign one, and a model that was made smaller may be without.
        buffers: list[Tensor] = [getattr(module, name) for module, name in self.shared if name in module._buffers]
        for dtype in dict.fromkeys(b.dtype for b in buffers):
            same = [b for b in buffers if b.dtype == dtype]
            flat = torch.cat([b.flatten().to(self.group.device) for b in same])  # one may be at the host
            self.across.broadcast(flat, tag="buffers")
            self.group.broadcast(flat, tag="buffers")
            if self.group.rank != 0 or self.across.rank != 0:
                for buffer, new in zip(same, flat.split([b.numel() for b in same]), strict=True):  # type: ignore[no-untyped-call]
                    unseen = buffer in self.seen and self.seen[buffer] == buffer._version
                    (buffer.data if unseen else buffer).copy_(new.view(buffer.shape))
                    self.seen[buffer] = buffer._version
