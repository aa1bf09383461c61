"""Adam with or without bias correction: without it, Adam stands from the first step where it gets to in time anyway.

m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g**2
p -= lr * (m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps) + weight_decay * p)
Without `adam_w_mode` the decay goes into the gradient instead: g + weight_decay * p. Both divisors become 1 as the step
number t grows. So Adam without bias correction, BERT's optimizer, is Adam whose steps all have number infinity, and
torch's fused kernel computes it as it is. Its first steps are larger: a warm-up has to tame them. 8 bytes of state a
parameter in fp32; the same bits on any cut at a multiple of 64 elements.
Kingma and Ba 2014, arXiv:1412.6980, section 3. DeepSpeed's file: ops/adam/fused_adam.py, `bias_correction`.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


class Adam(torch.optim.Adam):
    """torch's Adam, fused, by default with decoupled weight decay. `bias_correction` is an option of each group."""

    elementwise = True  # ZeRO may cut its parameters into shards

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        fused: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, fused=fused, decoupled_weight_decay=adam_w_mode)
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Torch's: fill `lists` with what the kernel works on, of which the last are the step numbers."""
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        if not group["bias_correction"]:
            for step in lists[-1]:
                step.fill_(math.inf)  # one more is infinity again, and beta**infinity is 0
        return has_complex
