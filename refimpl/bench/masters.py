"""AdamW for bf16 weights with an fp32 master of each: what torch leaves to its user, so that its DDP can race in bf16.

A step widens the gradients into fp32, updates the masters by torch's fused AdamW and rounds them into the weights:
2 + 2 + 4 + 4 + 8 bytes a parameter, of which 4 are the fp32 gradients, kept because fresh memory costs page faults.
Micikevicius et al. 2018, arXiv:1710.03740, section 3.1.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


class MasterAdamW(torch.optim.Optimizer):
    """Parameters and gradients in bf16, the masters and both moments in fp32. Every parameter must have a gradient."""

    def __init__(self, params: ParamsT, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.rounded: list[Tensor] = [p for group in self.param_groups for p in group["params"]]
        self.masters = [p.detach().float() for p in self.rounded]
        self.wide = [torch.zeros_like(master) for master in self.masters]
        for master, gradient in zip(self.masters, self.wide, strict=True):
            master.grad = gradient
        self.adamw = torch.optim.AdamW(self.masters, lr, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """No closures."""
        torch._foreach_copy_(self.wide, [p.grad for p in self.rounded if p.grad is not None])
        self.adamw.step()
        torch._foreach_copy_(self.rounded, self.masters)
