"""Which parameters belong to experts, and optimizer groups that keep them apart from the others.

DeepSpeed marks them: `allreduce = False`, and `group_name = "ep_size_4"` by how many ranks share a layer's experts.
Its engine needs groups of their own, which the function here makes; refimpl's reads the marks and takes either.
DeepSpeed: deepspeed/moe/utils.py.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.deepspeed.moe.layer import MoE
from refimpl.parallel.expert.marks import is_expert as is_moe_param

__all__ = [
    "configure_moe_param_groups", "has_moe_layers", "is_moe_param", "is_moe_param_group",
    "split_params_grads_into_shared_and_expert_params", "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]  # fmt: skip

Params = list[nn.Parameter]
ParamGroup = dict[str, Any]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether there is a `MoE` in the module, and the number of experts of the first; (False, 0) without one."""
    first = next((module for module in m.modules() if isinstance(module, MoE)), None)
    return (False, 0) if first is None else (True, first.num_experts)


def split_params_into_shared_and_expert_params(params: Iterable[nn.Parameter]) -> tuple[Params, Params]:
    """(those of no expert, those of experts)."""
    params = list(params)
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[Tensor], list[Tensor]]:
    """The same of their gradients, in the parameters' dtype; parameters without one are left out."""
    shared, expert = split_params_into_shared_and_expert_params(p for p in group if p.grad is not None)
    return [grad.to(p.dtype) for p in shared if (grad := p.grad) is not None], [
        grad.to(p.dtype) for p in expert if (grad := p.grad) is not None
    ]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: ParamGroup | tuple[ParamGroup, ...] | list[ParamGroup], max_group_size: float | None = 178956971
) -> list[ParamGroup]:
    """The groups without their experts' parameters, and after them one or more for each and each `group_name`.

    A new group has the options of the one it was taken from, `moe: True`, the experts' name, and at most
    `max_group_size` numbers, unless one parameter is larger; None for no limit. The groups that were given are changed,
    as DeepSpeed changes them. ValueError for anything but a group, a list or a tuple.
    """
    if not isinstance(param_groups, dict | list | tuple):
        raise ValueError(f"Unknown param group type of {type(param_groups)}: a group, a list or a tuple of them")
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    apart: list[ParamGroup] = []
    for group in groups:
        params = list(group["params"])
        group["params"], experts = split_params_into_shared_and_expert_params(params)
        by_name: dict[str, Params] = {}
        for p in experts:
            by_name.setdefault(p.group_name, []).append(p)  # type: ignore[attr-defined]
        for name, members in by_name.items():
            parts = in_parts(members, max_group_size)
            apart += [{**group, "name": name, "moe": True, "params": part} for part in parts]
    return groups + apart


def in_parts(params: Params, most: float | None) -> list[Params]:
    """Consecutive parts of at most `most` numbers, or of one parameter."""
    parts: list[Params] = []
    room = 0.0
    for p in params:
        if not parts or (most is not None and p.numel() > room):
            parts.append([])
            room = torch.inf if most is None else most
        parts[-1].append(p)
        room -= p.numel()
    return parts


def is_moe_param_group(param_group: ParamGroup) -> bool:
    """Whether `split_params_into_different_moe_groups_for_optimizer` made it for experts."""
    return bool(param_group.get("moe", False))


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Any]:
    """Groups with experts apart, of parameters or groups; unchanged where some are. TypeError for another list."""
    if not isinstance(model_parameters, list) or not all(isinstance(p, Tensor | dict) for p in model_parameters):
        raise TypeError("model_parameters must be a list of parameters, or of groups of them")
    if model_parameters and isinstance(model_parameters[0], dict):
        if any("moe" in group for group in model_parameters):
            return model_parameters
        return split_params_into_different_moe_groups_for_optimizer(model_parameters)
    return split_params_into_different_moe_groups_for_optimizer({"params": model_parameters, "name": "dense-params"})
