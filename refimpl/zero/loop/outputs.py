"""The tensors in whatever a module returns: nested containers, dataclasses and other objects that hold them."""

from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


def tensors_of(tree: Any) -> list[Tensor]:
    """Every tensor in `tree`, once. Modules inside are not entered: their parameters are not outputs."""
    if isinstance(tree, Tensor):  # nearly always, and once a module
        return [tree]
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    open_ = [tree]
    while open_:
        for leaf in pytree.tree_leaves(open_.pop()):
            if isinstance(leaf, Tensor):
                found[id(leaf)] = leaf
            elif id(leaf) not in seen and hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
                seen.add(id(leaf))
                open_.append(list(vars(leaf).values()))
    return list(found.values())
