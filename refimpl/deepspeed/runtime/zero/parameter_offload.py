"""What libraries take off a ZeRO-3 model that is to generate, and put back afterwards: nothing.

    with deepspeed.zero.GatheredParameters(model.parameters()):
        for hook in model.optimizer.parameter_offload.forward_hooks: hook.remove()
        ... generate ...
        model.optimizer.parameter_offload._register_deepspeed_module(model.optimizer.parameter_offload.module)

DeepSpeed's hooks would let a parameter go after its first use. Here who has gathered a unit keeps it whole, so the
lists are empty and registering changes nothing. TRL's trainers do this by hand, `unwrap_model_for_generation` is
DeepSpeed's own. DeepSpeed: runtime/zero/parameter_offload.py and stage3.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from refimpl.zero.init import GatheredParameters
from refimpl.zero.loop.owned import Owned
from refimpl.zero.parameter import Managed
from refimpl.zero.zero3 import Zero3


class DeepSpeedZeRoOffload:
    """`optimizer.parameter_offload` of stage 3."""

    def __init__(self, stage: Zero3) -> None:
        self.module = Whole(stage)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """Nothing was removed."""


class Whole:
    """The model, as far as somebody looks for its parameters."""

    def __init__(self, stage: Zero3) -> None:
        self.stage = stage

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """All that the stage has, by name."""
        return ((prefix + name, p) for p, name in self.stage.names.items())

    def ds_external_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Those that another module reads: they are found when they are read, and nobody keeps a list."""
        return []


def _offload(optimizer: Owned) -> DeepSpeedZeRoOffload:
    if not isinstance(optimizer.stage, Zero3):
        raise AttributeError("parameter_offload: only ZeRO-3 has one")
    return DeepSpeedZeRoOffload(optimizer.stage)


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """`model` with whole parameters in the block, so that `generate` gathers nothing. A collective."""
    with GatheredParameters(model.parameters()):
        yield model


Owned.parameter_offload = property(_offload)  # type: ignore[attr-defined]
Managed.ds_active_sub_modules = property(lambda p: set())  # type: ignore[attr-defined]
