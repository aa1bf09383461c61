"""Lion under DeepSpeed's two names. DeepSpeed: deepspeed/ops/lion."""

from torch.optim.optimizer import ParamsT

from refimpl.optim.lion import Lion


class FusedLion(Lion):
    """refimpl's Lion with DeepSpeed's defaults."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


class DeepSpeedCPULion(Lion):
    """refimpl's Lion with DeepSpeed's defaults."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise ValueError("DeepSpeedCPULion: fp32_optimizer_states=False: not implemented, states stay in fp32")
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)
