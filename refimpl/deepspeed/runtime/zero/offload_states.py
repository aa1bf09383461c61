"""`engine.offload_states`, `reload_states`: states go to the host while somebody else needs the GPU, and come back.

What goes, and what is refused meanwhile: refimpl/zero/loop/parked.py. DeepSpeed:
deepspeed/runtime/zero/offload_states.py, `offload_states` in deepspeed/runtime/engine.py.
"""

import warnings
from collections.abc import Collection
from typing import Any

import torch

from refimpl.engine.engine import Engine
from refimpl.zero.loop.owned import Owned
from refimpl.zero.loop.parked import CLASSES


def get_state_devices(model: Engine, state: Any) -> set[torch.device]:
    """The devices on which a state (an OffloadStateTypeEnum) of an engine lies; none of buffers that were given up."""
    parked = model.stage.parked
    if str(state) in parked.away:
        return set() if str(state) == "contiguous_grad_buffer" else {torch.device("cpu")}
    return {tensor.device for tensor in parked.tensors(str(state))} or {model.device}


def offload_states(
    of: Engine | Owned,
    include: Collection[str] | None = None,
    device: str = "cpu",
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> None:
    """Send an engine's, or its optimizer's, states to the host; `include`: which (OffloadStateTypeEnum), default all.

    On every rank. Until `reload_states` a step, a save and a load are RuntimeErrors, and so is whatever else needs what
    is away. Twice is as good as once. device "none": nothing, with a warning. ValueError for "nvme", unknown states.
    """
    if device not in ("cpu", "none"):
        raise ValueError(f"offload_states: device={str(device)!r}: cpu is the one to which states can be sent")
    if device == "none":
        warnings.warn("offload_states: device='none': nothing is sent", stacklevel=2)
        return
    of.stage.parked.send([str(state) for state in (CLASSES if include is None else include)], pin_memory, non_blocking)


def reload_states(of: Engine | Owned, non_blocking: bool = False) -> None:
    """Bring back what `offload_states` has sent; nothing if it has not."""
    of.stage.parked.bring(non_blocking)


for kind in (Engine, Owned):
    setattr(kind, "offload_states", offload_states)  # noqa: B010
    setattr(kind, "reload_states", reload_states)  # noqa: B010
