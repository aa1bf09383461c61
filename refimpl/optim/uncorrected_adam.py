"""Adam without bias correction, BERT's optimizer: its first steps are larger, so a warm-up has to tame them.

m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g**2
p -= lr * (m / (sqrt(v) + eps) + weight_decay * p)
Without `adam_w_mode` the decay goes into the gradient instead: g + weight_decay * p. Adam divides m by 1 - beta1**t and
v by 1 - beta2**t, which is forgotten after some thousand steps. 8 bytes of state a parameter in fp32, element-wise.
Kingma and Ba 2014, arXiv:1412.6980, section 3. DeepSpeed's file: ops/adam/fused_adam.py, `bias_correction=False`.
"""

from collections.abc import Callable
from typing import Any, overload

import torch
from torch.optim.optimizer import ParamsT


class UncorrectedAdam(torch.optim.Optimizer):
    """Parameters, gradients and the states `exp_avg` and `exp_avg_sq` share shape and dtype."""

    elementwise = True  # ZeRO may cut its parameters into shards

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adam_w_mode": adam_w_mode}
        super().__init__(params, options)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[p]
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        if group["adam_w_mode"]:
            decay = p * group["weight_decay"]
        else:
            grad, decay = grad + p * group["weight_decay"], torch.zeros_like(p)
        mean = state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).add_(grad * grad, alpha=1 - beta2)
        p.sub_((mean / (square.sqrt() + group["eps"]) + decay) * group["lr"])
