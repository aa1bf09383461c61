"""An optimizer's step taken part by part: each time as if it had some of its parameters alone.

What a step changes for all of them, it changes once: every part begins with what was `Given` before the step, and what
the last one leaves holds from then on (`keep_settings`).

    a group's option             schedule-free's k
    an entry of no parameter     state["k"] of pytorch_optimizer's MADGRAD: see counted.py
    an attribute                 a count of steps of the optimizer itself
"""

from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn, optim

from refimpl.zero.optimizer.counted import counted

OWN = "param_groups", "state"  # attributes that torch gives to every optimizer


@dataclass(frozen=True)
class Given:
    """What all parts of one step begin with: the options of the optimizer's groups, and the rest of the table."""

    groups: list[dict[str, Any]]
    counted: dict[str, Any]
    attributes: dict[str, Any]


class ByPart:
    """A part of `Slices`."""

    def __init__(self, optimizer: optim.Optimizer | None) -> None:
        self.optimizer = optimizer
        self.changed: list[dict[str, Any]] = []  # options that parts have changed, by group
        self.attributes: dict[str, Any] = {}  # that they have changed

    def settings(self) -> Given:
        """As they are now."""
        assert self.optimizer is not None
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        copies = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()} for group in options]
        attributes = {k: v for k, v in vars(self.optimizer).items() if k not in OWN}
        return Given(copies, counted(self.optimizer), attributes)

    def do_with(self, params: dict[int, list[nn.Parameter]], settings: Given, do: Callable[[Any], object]) -> None:
        """do(optimizer), as if it had these parameters alone, by group, and these settings; its changes are noted."""
        assert self.optimizer is not None
        twin = self.twin(settings, params)
        do(twin)
        self.optimizer.state.update(twin.state)
        for noted, group, given in zip(self.changed, twin.param_groups, settings.groups, strict=True):
            noted |= {k: v for k, v in group.items() if k != "params" and v is not given.get(k)}
        now = {k: v for k, v in vars(twin).items() if k not in OWN}
        self.attributes |= {k: v for k, v in now.items() if v is not settings.attributes.get(k)}

    def twin(self, settings: Given, params: dict[int, list[nn.Parameter]]) -> optim.Optimizer:
        """The optimizer, with these settings, these parameters and their states alone."""
        assert self.optimizer is not None
        twin = object.__new__(type(self.optimizer))
        groups = [{**given, "params": params.get(i, [])} for i, given in enumerate(settings.groups)]
        here = [p for those in params.values() for p in those if p in self.optimizer.state]
        state = defaultdict(dict, {p: self.optimizer.state[p] for p in here} | deepcopy(settings.counted))
        twin.__dict__ = settings.attributes | dict(zip(OWN, (groups, state), strict=True))
        self.changed += [{} for _ in groups[len(self.changed) :]]
        return twin

    def keep_settings(self) -> None:
        """What parts have changed is so from now on."""
        assert self.optimizer is not None
        for group, noted in zip(self.optimizer.param_groups, self.changed, strict=False):
            group |= noted
            noted.clear()
        vars(self.optimizer).update(self.attributes)
        self.attributes.clear()
