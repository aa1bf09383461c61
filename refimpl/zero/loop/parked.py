"""A stage's states at the host for a while, so that somebody else may have the device: mostly to generate.

    state                      what of a stage it is
    optim_states               the optimizer's tensors                    8/N bytes a parameter with AdamW
    hp_params                  fp32 masters, where weights are in 16 bits  4/N
    lp_params                  weights: whole ones, in ZeRO-3 shards       2, or 2/N
    lp_grads                   gradients between backward and step         2/N in bf16
    contiguous_grad_buffer     buffers of buckets: nothing is kept of them

Each byte goes over the link once each way. Tensors keep their identity and give their memory back, as a freed `Unit`
does: whatever views them is right again when they are back, and cannot be read before. What is at the host anyway, all
of it on a CPU, stays where it is, and is refused all the same, so that a script means the same everywhere. Buffers of a
delayed update stay on the device.
DeepSpeed: deepspeed/runtime/zero/offload_states.py, `offload_states` in stage3.py and stage_1_and_2.py, which points
each tensor at a copy, and lets a step on such copies fail as it may.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from refimpl.zero.stage import Stage

CLASSES = {
    "optim_states": "optimizer",
    "hp_params": "master weights",
    "lp_params": "parameters",
    "lp_grads": "gradients",
    "contiguous_grad_buffer": "buckets",
}
Moved = list[tuple[torch.UntypedStorage, Tensor]]  # what has no memory now, and its bytes at the host


class Parked:
    """Which states of `stage` are away, and their bytes."""

    def __init__(self, stage: "Stage") -> None:
        self.stage, self.away = stage, dict[str, Moved]()

    def send(self, states: Collection[str], pin: bool = True, non_blocking: bool = False) -> None:
        """These states to the host, on every rank; nothing for those that are there. ValueError for an unknown one.

        pin: into page-locked memory; non_blocking: return before the copies have arrived.
        """
        if unknown := [state for state in states if state not in CLASSES]:
            raise ValueError(f"offload_states: include has {unknown[0]!r}; known: {', '.join(CLASSES)}")
        self.stage.come_to_rest()
        if "contiguous_grad_buffer" in states:
            self.stage.gradients.trim()
            self.stage.group.trim()
        if "lp_params" in states:
            self.stage.alone.let_go(self.stage.group_of)
        for state in (state for state in CLASSES if state in states and state not in self.away):
            gone = state == "contiguous_grad_buffer"
            storages = {} if gone else {s.data_ptr(): s for t in self.tensors(state) if (s := t.untyped_storage())}
            self.away[state] = [
                (s, leave(s, pin, non_blocking)) for s in storages.values() if s.device.type != "cpu" and s.nbytes()
            ]
        if self.stage.group.device.type == "cuda":
            torch.cuda.empty_cache()

    def bring(self, non_blocking: bool = False) -> None:
        """All of them back to where they were; nothing if none is away."""
        for moved in self.away.values():
            for storage, there in moved:
                storage.resize_(there.numel())
                seen(storage).copy_(there, non_blocking=non_blocking)
        self.away = {}

    def refuse(self, *states: str) -> None:
        """RuntimeError if one of them (none given: any) is away."""
        if found := [state for state in self.away if not states or state in states]:
            raise RuntimeError(f"{', '.join(found)}: at the host since offload_states(); call reload_states() first")

    def tensors(self, state: str) -> list[Tensor]:
        """What belongs to a state."""
        return self.stage.tensors()[CLASSES[state]]


def seen(storage: torch.UntypedStorage) -> Tensor:
    """Its bytes. -> [n], uint8"""
    nothing = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return nothing.set_(storage, 0, (storage.nbytes(),), (1,))


def leave(storage: torch.UntypedStorage, pin: bool, non_blocking: bool) -> Tensor:
    """The storage's bytes at the host; it gives its memory back."""
    pinned = pin and storage.device.type == "cuda"
    there = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=pinned)
    there.copy_(seen(storage), non_blocking=non_blocking)
    storage.resize_(0)
    return there
