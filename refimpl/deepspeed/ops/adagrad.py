"""Adagrad under DeepSpeed's name: torch's. DeepSpeed: deepspeed/ops/adagrad/cpu_adagrad.py."""

import torch
from torch.optim.optimizer import ParamsT


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """torch.optim.Adagrad with DeepSpeed's arguments."""

    elementwise = True  # ZeRO may cut its parameters into shards

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad or not fp32_optimizer_states:
            raise ValueError("DeepSpeedCPUAdagrad: amsgrad and 16-bit states are not implemented; leave them out")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
