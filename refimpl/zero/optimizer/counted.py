"""What an optimizer counts beside the options of its groups and the states of its parameters.

pytorch_optimizer's MADGRAD keeps its count of steps in `optimizer.state["k"]`. Where a step goes part by part, each
part begins with what was there before the step; a checkpoint keeps it beside the groups' options. Bytes: a few.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor, optim


def counted(optimizer: optim.Optimizer | None) -> dict[str, Any]:
    """Copies of the entries of its state that are no parameter's."""
    state: dict[Any, Any] = {} if optimizer is None else optimizer.state
    return deepcopy({key: value for key, value in state.items() if not isinstance(key, Tensor)})


def put_counted(optimizer: optim.Optimizer, values: Mapping[str, Any]) -> None:
    """They are copies of these from now on, and there are no others."""
    state: dict[Any, Any] = optimizer.state
    for key in [key for key in state if not isinstance(key, Tensor)]:
        del state[key]
    state.update(deepcopy(dict(values)))


def states(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    """Those of its parameters."""
    return [state for key, state in optimizer.state.items() if isinstance(key, Tensor)]


def clear_states(optimizer: optim.Optimizer) -> None:
    """Of its parameters."""
    for key in [key for key in optimizer.state if isinstance(key, Tensor)]:
        del optimizer.state[key]
