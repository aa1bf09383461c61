"""Adam under DeepSpeed's two names: torch's, fused, on every device. DeepSpeed: deepspeed/ops/adam.

Both are AdamW unless told otherwise, with a weight decay of 0, as DeepSpeed's are.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from refimpl.optim.adam import Adam

Betas = tuple[float, float]


class FusedAdam(Adam):
    """AdamW, or Adam without `adam_w_mode`. DeepSpeed's runs on a GPU only."""

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
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, adam_w_mode, bias_correction)


class DeepSpeedCPUAdam(Adam):
    """FusedAdam with DeepSpeed's other spelling of `adam_w_mode`. DeepSpeed's runs on a CPU only."""

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
        super().__init__(model_params, lr, betas, eps, weight_decay, amsgrad, adamw_mode, bias_correction)


class MultiTensorApply:
    """apex's way to call an operator on lists of tensors, in chunks of so many elements.

    Its operators are not here: `FusedAdam` is torch's, and `torch._foreach_add_` and its kin take lists by themselves.
    """

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
    ) -> Any:
        """op(chunk size, flag, lists, *args). The operator sets the flag where it meets a number that is not finite."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
