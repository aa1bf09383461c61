"""Adam under DeepSpeed's two names: torch's, fused, on every device. DeepSpeed: deepspeed/ops/adam.

Both are AdamW unless told otherwise, with a weight decay of 0, as DeepSpeed's are.
"""

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

Betas = tuple[float, float]


class FusedAdam(torch.optim.Adam):
    """AdamW, or Adam without `adam_w_mode`. DeepSpeed's runs on a GPU only."""

    elementwise = True  # ZeRO may cut its parameters into shards

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(
            params, **_options("FusedAdam", lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)
        )


class DeepSpeedCPUAdam(torch.optim.Adam):
    """FusedAdam with DeepSpeed's other spelling of `adam_w_mode`. DeepSpeed's runs on a CPU only."""

    elementwise = True

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise ValueError("DeepSpeedCPUAdam: fp32_optimizer_states=False: not implemented, states stay in fp32")
        super().__init__(
            model_params,
            **_options("DeepSpeedCPUAdam", lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode),
        )


def _options(
    name: str, lr: float, bias_correction: bool, betas: Betas, eps: float, decay: float, amsgrad: bool, decoupled: bool
) -> dict[str, Any]:
    """Arguments of torch.optim.Adam. ValueError for what it cannot do."""
    if not bias_correction:
        raise ValueError(f"{name}: bias_correction=False: not implemented, torch's Adam always corrects")
    common = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay, "amsgrad": amsgrad}
    return common | {"decoupled_weight_decay": decoupled, "fused": True}
