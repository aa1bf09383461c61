"""Tensors of their own for torch.save. DeepSpeed: deepspeed/checkpoint/utils.py."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """`item` with a copy of every tensor in it on `device`: torch.save writes the whole storage behind a view."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone().to(device), item)
