"""The state that an optimizer saved without a stage, of whole parameters, into the stage that trains on with it.

A run under torch's DDP, or on one process, saves `optimizer.state_dict()`: whole tensors by a number, counted through
the groups. The stage counts the same parameters in the same order, so each rank takes of every tensor the elements that
it holds: no communication. torch's ZeroRedundancyOptimizer and fairscale's OSS take such a state, too.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from refimpl.zero.optimizer.counted import put_counted
from refimpl.zero.portable import Cut, restore_optimizer

if TYPE_CHECKING:
    from refimpl.zero.stage import Stage


class WholeState:
    """Where `restore_optimizer` reads: `saved` is a torch optimizer's state_dict of the stage's own parameters."""

    def __init__(self, stage: "Stage", saved: Mapping[str, Any]) -> None:
        """ValueError unless it has as many groups, and in each as many parameters, of the same shapes."""
        params = sorted(stage.group_of, key=stage.group_of.__getitem__)  # stable: within a group as they were given
        here = [list(stage.group_of.values()).count(i) for i in range(len(stage.optimizer.param_groups))]
        given = [len(group["params"]) for group in saved["param_groups"]]
        if given != here:
            raise ValueError(f"optimizer.load_state_dict: this state has groups of {given} parameters, here {here}")
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        self.of = {stage.names[p]: saved["state"].get(n, {}) for p, n in zip(params, numbers, strict=True)}
        self.shape = {stage.names[p]: p.shape for p in params}
        self.dtype = {stage.names[p]: dtype_of(stage, p) for p in params}
        for name, state in self.of.items() if stage.update.slices.kind.elementwise else ():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.numel() > 1 and value.shape != self.shape[name]:
                    raise ValueError(
                        f"optimizer.load_state_dict: {key} of {name} has the shape {tuple(value.shape)}, the parameter "
                        f"{tuple(self.shape[name])}: give the state of this model's optimizer, with its groups"
                    )

    def state(self, name: str) -> dict[str, Any]:
        """As torch loads it: what is like the parameter in the dtype that is updated here, the rest as it is."""
        shape, dtype = self.shape[name], self.dtype[name]
        return {
            key: Cut(dtype if value.is_floating_point() else value.dtype)
            if isinstance(value, Tensor) and value.shape == shape and key != "step"
            else deepcopy(value)
            for key, value in self.of[name].items()
        }

    def fill(self, key: str, name: str, begin: int, out: Tensor) -> None:
        out.copy_(self.of[name][key].reshape(-1)[begin : begin + out.numel()])


def dtype_of(stage: "Stage", p: nn.Parameter) -> torch.dtype:
    """The dtype in which p is updated; its own, if it is not trained."""
    bucket = stage.home(p)
    slices = [] if bucket is None else stage.update.slices.of.get(bucket, [])
    return slices[0].param.dtype if slices else p.dtype


def take_whole(stage: "Stage", saved: Mapping[str, Any]) -> None:
    """The stage's optimizer goes on with this state, and with its groups' options."""
    source = WholeState(stage, saved)
    for group, given in zip(stage.optimizer.param_groups, saved["param_groups"], strict=True):
        group |= deepcopy({k: v for k, v in given.items() if k not in ("params", "param_names")})
    put_counted(stage.optimizer, {key: value for key, value in saved["state"].items() if not isinstance(key, int)})
    restore_optimizer(stage, source, source.of)
