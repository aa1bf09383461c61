"""What 1-bit Adam, 0/1 Adam and 1-bit LAMB share: from some step on they average something else than the gradients.

A stage hands them an `Exchange`: the mean over ranks of some tensors, compressed to one bit an element, with errors
kept at both ends. It asks `takes_mean_gradient` before each backward whether it is to average the gradients itself, in
full precision. Alone, or on one rank, there is nothing to average and nothing is compressed.

`bias_correction` is Adam's, as torch's AdamW has it, with the count at which the variance was frozen (LAMB: see
one_bit_lamb.py). The papers have none, and DeepSpeed's option of that name has no effect there: False gives what both
compute.

One bit cannot say zero. An element that never had a gradient has no variance either, so that one bit of noise, divided
by eps, would blow it up: such elements are left out of the exchange and keep their weights, and a warning counts them
at the freeze. DeepSpeed leaves this to the user's `exp_avg_mask`, an option of a parameter group, of each parameter's
size, 0 where the momentum is to stay 0; it is honoured here too, and like there never taken from a checkpoint.
"""

import warnings
from abc import abstractmethod
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from refimpl.optim.base import Base, Moved
from refimpl.optim.lamb import check_adam, denominator, direction

MASK = "exp_avg_mask"
Backend = Literal["nccl", "gloo", "compressed", "mpi", "hccl"]


class Exchange(Protocol):
    """Who averages over ranks; this one is number `rank`."""

    rank: int

    def mean(self, params: list[Tensor], values: list[Tensor], dead: list[Tensor]) -> None:
        """Replace values, fp32 and shaped like `params`, by their compressed means; 0 where `dead`. A collective."""

    def forget(self) -> None:
        """Drop the errors: what is exchanged from now on is of another kind."""


class Travelling(Base):
    """Base of the three. Its options are those that DeepSpeed's share."""

    exchange: Exchange | None = None  # set by a stage of more than one rank

    def __init__(
        self,
        params: ParamsT,
        options: dict[str, Any],
        bias_correction: bool,
        amsgrad: bool,
        cuda_aware: bool,
        comm_backend_name: Backend,
    ) -> None:
        name = type(self).__name__
        check_adam(name, options["lr"], options["betas"], options["eps"], options["weight_decay"], amsgrad)
        if comm_backend_name not in get_args(Backend):
            raise ValueError(
                f"{name}: comm_backend_name is {comm_backend_name!r}; one of {', '.join(get_args(Backend))}"
            )
        if cuda_aware or comm_backend_name == "mpi":
            warnings.warn(f"{name}: there is no MPI here: ranks talk over the stage's group", stacklevel=3)
        super().__init__(params, {**options, "bias_correction": bias_correction, "taken": 0})

    @property
    def taken(self) -> int:
        """Steps so far; skipped ones do not count."""
        return int(self.param_groups[0]["taken"])

    @property
    @abstractmethod
    def takes_mean_gradient(self) -> bool:
        """Whether the next step wants the mean of the ranks' gradients; else each rank's own."""

    def meet(self) -> bool:
        """Bring weights that differ between ranks together, if they do; whether they did. A collective."""
        return False

    def update(self, moved: Moved) -> None:
        """Count the step: what moves the parameters, in a subclass, is number `taken`, from 1."""
        for group in self.param_groups:
            group["taken"] += 1

    def fresh(self, p: Tensor, *keys: str) -> dict[str, Any]:
        """p's state, in which `keys` are zeros of its shape where they were not."""
        state: dict[str, Any] = self.state[p]
        for key in keys:
            if key not in state:
                state[key] = torch.zeros_like(p, memory_format=torch.contiguous_format)
        return state

    def moments(self, p: Tensor, group: dict[str, Any], grad: Tensor, variance: bool) -> dict[str, Any]:
        """Take a gradient into p's momentum and, if asked for, its variance; p's state."""
        beta1, beta2 = group["betas"]
        state = self.fresh(p, "exp_avg", "exp_avg_sq")
        state["step"] = state.get("step", 0) + 1
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        if variance:
            state["variance_step"] = state.get("variance_step", 0) + 1
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        return state

    def correction(self, p: Tensor, group: dict[str, Any], beta: float, steps: str) -> float:
        """What an average of p's that has seen so many `steps` is divided by: it began at 0.

        1 without `bias_correction`.
        """
        return 1 - beta ** max(1, self.state[p].get(steps, 0)) if group["bias_correction"] else 1.0

    def root(
        self, p: Tensor, group: dict[str, Any], variance: str = "exp_avg_sq", steps: str = "variance_step"
    ) -> Tensor:
        """sqrt(v) + eps of Adam, v corrected; in new memory."""
        correction, v = self.correction(p, group, group["betas"][1], steps), self.state[p][variance]
        return denominator(v if correction == 1 else v / correction, group)

    def adams(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Adam's direction, m / (sqrt(v) + eps) + weight_decay * p, both corrected; in new memory."""
        correction = self.correction(p, group, group["betas"][0], "step")
        return direction(p, self.state[p], group, self.root(p, group), correction)

    def mean(self, params: list[Tensor], values: list[Tensor], groups: list[dict[str, Any]]) -> None:
        """Replace values [...] of `params` by their mean over ranks, compressed, and 0 where there is no variance."""
        dead = [self.dead(p, group) for p, group in zip(params, groups, strict=True)]
        for value, out in zip(values, dead, strict=True):
            value.masked_fill_(out, 0)
        if self.exchange is not None:
            self.exchange.mean(params, values, dead)

    def dead(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """bool, p's shape: which elements have no variance, or are masked."""
        variance: Tensor = self.state[p]["exp_avg_sq"]
        out = variance == 0
        mask = group.get(MASK)
        if mask is None:
            return out
        if mask.numel() != p.numel():
            raise ValueError(
                f"{MASK} has {mask.numel()} elements, and a parameter of its group {p.numel()}: give each masked "
                "parameter a group of its own"
            )
        masked: Tensor = mask.to(p.device).view(p.shape) == 0
        return out | masked

    def freeze_variance(self, moved: Moved) -> None:
        """From the next step on: say how many elements have none, and owe nothing of what was exchanged before.

        That was gradients, or momenta of a freeze that a checkpoint had behind it and this run has ahead of it.
        """
        if self.exchange is not None:
            self.exchange.forget()
        none = sum(int((self.state[p]["exp_avg_sq"] == 0).sum()) for p, group in moved if MASK not in group)
        if none and (self.exchange is None or self.exchange.rank == 0):
            total = sum(p.numel() for p, _ in moved)
            warnings.warn(
                f"{type(self).__name__}: {none} of {total} elements had no gradient in the {self.taken} steps before "
                "the variance is frozen: they keep their weights from now on; freeze later, if they are to learn",
                stacklevel=5,
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's, but for masks, which stay as they are here."""
        masks = [group.get(MASK) for group in self.param_groups]
        groups = [{k: v for k, v in group.items() if k != MASK} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})
        for group, mask in zip(self.param_groups, masks, strict=True):
            if mask is not None:
                group[MASK] = mask


def least_one(name: str, **numbers: int) -> None:
    """ValueError for a count of steps that is not a whole number of at least 1."""
    for key, value in numbers.items():
        if value != int(value) or value < 1:
            raise ValueError(f"{name}: {key} is {value}; it must be a whole number of at least 1")
