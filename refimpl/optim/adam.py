"""Adam with or without bias correction: without it, Adam stands from the first step where it gets to in time anyway.

m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g**2
p -= lr * (m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps) + weight_decay * p)
Without `adam_w_mode` the decay goes into the gradient instead: g + weight_decay * p. Both divisors become 1 as the step
number t grows. So Adam without bias correction, BERT's optimizer, is Adam whose steps all have number infinity, and
torch's fused kernel computes it as it is, and so does ours on a GPU. Its first steps are larger: a warm-up has to tame
them. 8 bytes of state a parameter in fp32; the same bits on any cut at a multiple of 64 elements.
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
        ours = group["fused"] and not (group["amsgrad"] or group["maximize"] or group["differentiable"])
        if ours and lists[0] and lists[0][0].is_cuda:  # and so is the step number, if torch's would be fused
            self.update(group, *lists)
        return has_complex

    def update(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        """On a GPU: fp32 parameters by our kernel, which reads 16-bit gradients too; only the rest stays in `lists`."""
        from refimpl.kernels.adamw import adamw  # here, as it imports triton

        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        params, grads, first, second, _, steps = lists
        for i in reversed(range(len(params))):
            if params[i].dtype == torch.float32 and all(t.is_contiguous() for t in (params[i], grads[i], first[i])):
                steps[i] += 1 if found_inf is None else 1 - found_inf
                adamw(
                    params[i], grads[i], first[i], second[i], steps[i], group["lr"], group["betas"], group["eps"],
                    group["weight_decay"], adam_w=group["decoupled_weight_decay"],
                    grad_scale=scale, found_inf=found_inf,
                )  # fmt: skip
                for column in (params, grads, first, second, steps):
                    del column[i]
