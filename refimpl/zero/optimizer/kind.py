"""What an optimizer's class allows: where its parameters may be cut so that it computes the same.

    kind           the update of an element depends on   may be cut                       such as
    element-wise   that element                          anywhere                         `ELEMENTWISE`, Lion
    layer-wise     and what it asks the stage about its  where its parameter begins,      LAMB, Muon
                   whole parameter                       ends, or a shard does
    travelling     and what it sends to other ranks      not at all                       1-bit Adam
    any other      all of its parameter                  not at all                       LBFGS, Adafactor

A class says what it is by `elementwise = True` or `layerwise = True`; for another's the user may
(`allow_untested_optimizer`), and then it is tried: see tried.py. (DeepSpeed takes the user's word.)
DeepSpeed: deepspeed/runtime/zero/utils.py, `is_zero_supported_optimizer`.
"""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from refimpl.optim.travelling import Travelling
from refimpl.zero.optimizer.counted import states
from refimpl.zero.optimizer.tried import what_fails

ELEMENTWISE = (
    optim.AdamW, optim.Adam, optim.SGD, optim.Adagrad, optim.RMSprop, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.ASGD, optim.Rprop,
)  # fmt: skip

APEX = "apex.optimizers.fused_adam.FusedAdam"  # by its name: apex is not imported. DeepSpeed's list has it too

RATE = 0.01  # of a trial


class Kind:
    """Of one optimizer, as it was handed over; None: nothing to update."""

    def __init__(self, optimizer: optim.Optimizer | None, allow_untested: bool = False) -> None:
        """ValueError if it has already taken steps, or could have; TypeError if it takes no dense gradient."""
        if isinstance(optimizer, optim.SparseAdam):
            raise TypeError(
                "SparseAdam takes sparse gradients alone, and every stage averages gradients dense: use Adam, which "
                "also moves the rows that a step did not read, by their momentum"
            )
        self.cls: Any = type(optimizer)  # its class, before a stage takes it over
        self.layerwise = is_layerwise(self.cls)
        self.travels = isinstance(optimizer, Travelling)
        self.elementwise = is_elementwise(self.cls) and not self.layerwise
        self.fails = ""  # in what an optimizer that was allowed did not stand the trial
        if allow_untested and optimizer is not None and not (self.elementwise or self.layerwise or self.travels):
            self.fails = self.tried(optimizer)
            self.elementwise = not self.fails
        # Whether it asks a closure for the loss once, before anything else, so that the stage can do it.
        self.asks_once = self.elementwise or self.layerwise or self.travels
        made = [] if optimizer is None else states(optimizer)
        if any(map(has_stepped, made)):
            raise ValueError(
                f"{self.name} has already taken steps, or its constructor has made state without a count of them, such "
                "as copies of the weights, which no stage can cut: build the stage first, then load the state"
            )
        self.born_with_state = bool(made)  # made by its constructor (Adagrad)
        self.born_with_tensors = any(isinstance(value, Tensor) for state in made for value in state.values())

    def tried(self, optimizer: optim.Optimizer) -> str:
        """What the optimizer does not do alike on a part of a parameter; "" for nothing."""

        def make(index: int, params: Sequence[nn.Parameter]) -> optim.Optimizer:
            twin = self.twin(optimizer, index, params)
            for group in twin.param_groups:
                if (rate := group.get("lr")) is not None:  # a schedule begins with 0, which shows nothing
                    group["lr"] = torch.full_like(rate, RATE) if isinstance(rate, Tensor) else RATE
            return twin

        groups = {
            (g["params"][0].device, beyond_rate(g)): i for i, g in enumerate(optimizer.param_groups) if g["params"]
        }
        return next((words for (device, _), i in groups.items() if (words := what_fails(partial(make, i), device))), "")

    def twin(self, optimizer: optim.Optimizer, index: int, params: Sequence[nn.Parameter]) -> optim.Optimizer:
        """A new one over these parameters alone, with the options of the optimizer's group `index`."""
        accepted = inspect.signature(self.cls.__init__).parameters
        given = {k: v for k, v in optimizer.defaults.items() if k in accepted}
        options = {k: v for k, v in optimizer.param_groups[index].items() if k != "param_names"}
        twin: optim.Optimizer = self.cls([{**options, "params": params}], **given)
        if hasattr(twin, "train"):  # schedule-free ones step in no other mode
            twin.train()
        return twin

    def widths(self, optimizer: optim.Optimizer, index: int) -> list[torch.dtype]:
        """The dtypes of the states that it makes of a parameter of group `index`: a twin is asked."""
        p = nn.Parameter(torch.zeros(1, 2))  # a matrix: Muon moves nothing else
        p.grad = torch.zeros(1, 2)
        twin = self.twin(optimizer, index, [p])
        self.cls.step(twin)
        return [t.dtype for t in twin.state[p].values() if isinstance(t, Tensor) and t.shape == p.shape]

    @property
    def name(self) -> str:
        """With its module: others have an AdamW and a Lion too."""
        return f"{self.cls.__module__}.{self.cls.__name__}".removeprefix("__main__.")

    def refuse_shard(self) -> None:
        """TypeError if on a part of a parameter it would compute something else."""
        if self.layerwise or self.elementwise:
            return
        if self.travels:
            raise TypeError(
                f"{self.cls.__name__} averages its momentum over the ranks by itself, and needs all of it on each: "
                "use DDP (ZeRO stage 0), as in DeepSpeed"
            )
        if self.fails:
            raise TypeError(
                f"{self.name} is allowed (zero_allow_untested_optimizer), but did not pass the trial: {self.fails}. "
                "Use DDP (ZeRO stage 0), or another optimizer; `elementwise = True` on its class takes it as it is"
            )
        raise TypeError(
            f"{self.name} is not known to be element-wise: on a shard it may compute something else. Known: "
            f"{', '.join(k.__name__ for k in ELEMENTWISE)}, and refimpl's Lion, Lamb, Muon. Use DDP (stage 0), or, if "
            "every element's update depends on that element alone, set allow_untested_optimizer=True "
            "(zero_allow_untested_optimizer), or `elementwise = True` on its class"
        )


def beyond_rate(group: dict[str, Any]) -> str:
    """A group's options, in words, but for its rate (whether it has one) and whose they are."""
    own = ("params", "param_names", "lr", "initial_lr")
    return repr({k: v for k, v in group.items() if k not in own} | {"has a rate": group.get("lr") is not None})


def is_elementwise(kind: type) -> bool:
    """Whether every element's update depends on that element alone."""
    known = kind in ELEMENTWISE or f"{kind.__module__}.{kind.__qualname__}" == APEX
    return known or bool(getattr(kind, "elementwise", False))


def is_layerwise(kind: type) -> bool:
    """Whether it is element-wise but for what it asks about whole parameters."""
    return bool(getattr(kind, "layerwise", False))


def has_stepped(state: dict[str, Any]) -> bool:
    """Whether an optimizer's state of one parameter is more than what its constructor made."""
    for count in ("step", "n_iter"):
        if count in state:
            return float(state[count]) > 0
    return any(isinstance(value, Tensor) for value in state.values())
