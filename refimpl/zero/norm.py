"""The gradient's norm as scripts read it: a number with `.item()`, taken by torch's functions like a tensor.

DeepSpeed's is a 0-dimensional tensor in stages 1 to 3 and a float elsewhere: scripts say `norm.item()` and
`torch.isnan(norm)` as well as `f"{norm:.3f}"` and `json.dumps`. DeepSpeed: deepspeed/runtime/engine.py,
`get_global_grad_norm`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


class GradNorm(float):
    """A float."""

    def item(self) -> float:
        """Itself, as a plain float."""
        return float(self)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda norm: torch.tensor(float(norm)), (args, dict(kwargs or {})))
        return function(*args, **kwargs)


torch.serialization.add_safe_globals([GradNorm])  # scripts save it with what they log: `torch.load` takes it back


def shown(norm: float | None) -> GradNorm | None:
    """None before the first step."""
    return None if norm is None else GradNorm(norm)
