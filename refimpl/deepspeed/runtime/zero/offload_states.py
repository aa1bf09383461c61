"""Where states lie that DeepSpeed can send to the host while somebody else needs the GPU.

On a CPU they are there. On a GPU `offload_optimizer` keeps them at the host all the time; to and fro is not built.
DeepSpeed: deepspeed/runtime/zero/offload_states.py, `offload_states` in deepspeed/runtime/engine.py.
"""

from typing import Any

import torch

from refimpl.engine.engine import Engine
from refimpl.zero.owned import Owned


def get_state_devices(model: Engine, state: Any) -> set[torch.device]:
    """The devices on which a state (an OffloadStateTypeEnum) of an engine lies, which is the engine's own."""
    return {model.device}


def offload_states(
    of: Engine | Owned, include: Any = None, device: str = "cpu", pin_memory: bool = True, non_blocking: bool = False
) -> None:
    """Leave an engine's, or its optimizer's, states at the host. NotImplementedError where they are on a GPU."""
    here = of.device if isinstance(of, Engine) else of.stage.group.device
    if device not in ("cpu", "none"):
        raise ValueError(f"offload_states: device={str(device)!r}: cpu is the one to which states can be sent")
    if device == "cpu" and here.type != "cpu":
        raise NotImplementedError(
            f"offload_states from {here}: not implemented yet: zero_optimization.offload_optimizer.device = 'cpu' "
            "keeps optimizer states and masters at the host"
        )


def reload_states(of: Engine | Owned, non_blocking: bool = False) -> None:
    """They have never left."""


for kind in (Engine, Owned):
    setattr(kind, "offload_states", offload_states)  # noqa: B010
    setattr(kind, "reload_states", reload_states)  # noqa: B010
