"""DiLoCo: every H steps the distance that each rank has come is averaged, and a second optimizer takes it as gradient.

    theta       the weights that all ranks began the round with
    theta_i     rank i's, after H steps of the inner optimizer (AdamW)
    delta       mean over ranks of theta - theta_i
    theta       <- outer optimizer (SGD with Nesterov momentum) of theta, with delta as its gradient

    diloco = DiLoCo(model, every=500)      # then diloco.step() behind each optimizer.step(), as in `local_sgd`

Memory, bytes per parameter beside the inner optimizer: 4 for theta, 4 for the outer momentum, and 4 while ranks meet.
Traffic: 2 n (N-1)/N bytes every H steps, 1/H of DDP's; half as much with wire=torch.bfloat16. An outer SGD with lr 1
and no momentum is local SGD. The inner optimizer's state stays each rank's own, as in the paper.
Douillard et al. 2023, arXiv:2311.08105, algorithm 1; its recipe: inner AdamW lr 4e-4, weight decay 0.1, 1,000 steps of
warm-up; outer lr 0.7, momentum 0.9; H = 500; 8 ranks that begin with trained weights. torchft: torchft/local_sgd.py.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim

from refimpl.comm.group import Group
from refimpl.optim.local_sgd import Meeting, fill
from refimpl.optim.weights import Weights, mean_over, refuse_not_finite

MakeOuter = Callable[[list[nn.Parameter]], optim.Optimizer]


def nesterov(params: list[nn.Parameter]) -> optim.Optimizer:
    """The paper's outer optimizer."""
    return optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo(Meeting):
    """`outer` is the optimizer of theta: a schedule may change its learning rate."""

    def __init__(
        self,
        model: Weights | nn.Module | Iterable[nn.Parameter],
        every: int,
        group: Group | None = None,
        outer: MakeOuter = nesterov,
        **options: Any,
    ) -> None:
        """`outer` makes a torch optimizer of parameters, in their shapes. `options`: those of `Meeting`."""
        super().__init__(model, every, group, **options)
        self.theta = [nn.Parameter(wide(tensor).clone(), requires_grad=False) for tensor in self.weights.read()]
        self.known = list(self.weights.names)
        self.outer = outer(self.theta)

    def meet(self) -> None:
        """One outer step. RuntimeError if more is trained than when this was built: its theta was never kept."""
        self.weights.refresh()
        if more := [name for name in self.weights.names if name not in self.known]:
            raise RuntimeError(
                f"DiLoCo: trained since it was built, so nobody knows where the round began: {', '.join(more)}; build "
                "DiLoCo anew after you unfreeze, and before the next step"
            )
        own = self.weights.read()
        # From theta as the model was given it: what rounding it to bf16 has moved is no distance that a rank has come.
        deltas = [theta.to(mine.dtype).to(theta.dtype) - mine for theta, mine in zip(self.theta, own, strict=True)]
        mean_over(self.group, deltas, self.message_size, self.wire, "outer gradients")
        refuse_not_finite(self.group, deltas, own, self.known)
        kept = [(part, part.clone()) for part in self.weights.frozen([theta.data for theta in self.theta])]
        for theta, delta in zip(self.theta, deltas, strict=True):
            theta.grad = delta
        self.outer.step()
        self.outer.zero_grad()
        for part, before in kept:  # momentum must not move what is frozen now
            part.copy_(before)
        self.weights.write([theta.to(mine.dtype) for theta, mine in zip(self.theta, own, strict=True)])

    def state_dict(self) -> dict[str, Any]:
        """As `Meeting.state_dict`, with theta and the outer optimizer's state."""
        outer = self.outer.state_dict()
        return {**super().state_dict(), "theta": [theta.detach().clone() for theta in self.theta], "outer": outer}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `Meeting.load_state_dict`. The weights become theta where it was saved at a meeting."""
        super().load_state_dict(state)
        fill([theta.data for theta in self.theta], state["theta"], self.known)
        self.outer.load_state_dict(state["outer"])
        if state["local"] is None:
            own = self.weights.read()
            self.weights.write([theta.to(mine.dtype) for theta, mine in zip(self.theta, own, strict=True)])


def wide(tensor: Tensor) -> Tensor:
    """fp32 of what is less exact."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
