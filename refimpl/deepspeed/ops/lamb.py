"""LAMB under DeepSpeed's name. DeepSpeed: deepspeed/ops/lamb/fused_lamb.py."""

from torch.optim.optimizer import ParamsT

from refimpl.optim.lamb import Lamb


class FusedLamb(Lamb):
    """refimpl's Lamb, on every device. DeepSpeed's runs on a GPU only."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        refuse_clipping("FusedLamb", max_grad_norm)
        super().__init__(
            params, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay, max_coeff, min_coeff, amsgrad
        )


def refuse_clipping(name: str, max_grad_norm: float) -> None:
    """ValueError for an optimizer that is to clip by itself."""
    if max_grad_norm:
        raise ValueError(f"{name}: max_grad_norm = {max_grad_norm}: set gradient_clipping in the configuration")
