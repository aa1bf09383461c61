"""Lion steps by the sign of an interpolated momentum: every element moves by the learning rate, up or down.

u = sign(beta1 * m + (1 - beta1) * g);  p -= lr * (u + weight_decay * p);  m = beta2 * m + (1 - beta2) * g
One state tensor, so 4 bytes a parameter in fp32 where Adam keeps 8. Element-wise: any split of the parameters into
shards gives the same bits. A sign step is larger than Adam's: use a learning rate 3 to 10 times smaller and a weight
decay as much larger. Chen et al. 2023, arXiv:2302.06675, algorithm 2. DeepSpeed's file: ops/lion/fused_lion.py.
"""

import torch
from torch.optim.optimizer import ParamsT

from refimpl.optim.base import Base, Moved


class Lion(Base):
    """Lion with decoupled weight decay. Parameters, gradients and the momentum `exp_avg` share shape and dtype."""

    elementwise = True  # ZeRO may cut its parameters into shards

    def __init__(
        self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        if not (lr >= 0 and weight_decay >= 0 and len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(
                f"Lion needs lr and weight_decay >= 0 and two betas in [0, 1): {lr=} {weight_decay=} {betas=}"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, moved: Moved) -> None:
        """See the formulas above."""
        for p, group in moved:
            assert p.grad is not None
            beta1, beta2 = group["betas"]
            state = self.state[p]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(p)
            momentum = state["exp_avg"]
            direction = (momentum * beta1).add_(p.grad, alpha=1 - beta1).sign_()
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
            momentum.mul_(beta2).add_(p.grad, alpha=1 - beta2)
