"""Which parameters belong to experts: those that DeepSpeed marks with `allreduce = False`. None do without its layer.

DeepSpeed: deepspeed/moe/utils.py.
"""

from torch import Tensor, nn

from refimpl.deepspeed.later import later

split_params_into_different_moe_groups_for_optimizer = later(
    "deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer", "mixture of experts"
)


def is_moe_param(param: Tensor) -> bool:
    """Whether `param` belongs to an expert."""
    return getattr(param, "allreduce", True) is False


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """Whether there are experts in `module`, and how many to a layer: (False, 0), as there is no such layer yet."""
    return False, 0
