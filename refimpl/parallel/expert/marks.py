"""The two marks on an expert's parameter, which are DeepSpeed's: `allreduce = False`, `group_name = "ep_size_4"`.

The first says that not every rank has it, the second how many ranks share the experts of its layer. A parameter
without them is dense. DeepSpeed: deepspeed/moe/utils.py, `is_moe_param`; moe/experts.py.
"""

import re
from typing import Any

from torch import Tensor, nn


def mark(experts: nn.Module, group_name: str | None) -> None:
    """All parameters of a module of experts."""
    for p in experts.parameters():
        p.allreduce = False  # type: ignore[attr-defined]
        p.group_name = group_name  # type: ignore[attr-defined]


def is_expert(p: Tensor) -> bool:
    """Whether p belongs to an expert that not all ranks have."""
    return getattr(p, "allreduce", True) is False


def name_of(ranks: int) -> str:
    """The name of the groups of so many ranks that share experts."""
    return f"ep_size_{ranks}"


def ranks_of(group_name: Any) -> int | None:
    """How many ranks a group of this name has; None if it is no such name."""
    size = re.fullmatch(r"ep_size_([1-9]\d*)", str(group_name))
    return int(size[1]) if size else None
