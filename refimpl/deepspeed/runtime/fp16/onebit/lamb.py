"""1-bit LAMB under DeepSpeed's name. DeepSpeed until 0.19.6: deepspeed/runtime/fp16/onebit/lamb.py."""

from typing import Any

from torch.optim.optimizer import ParamsT

from refimpl.deepspeed.ops.lamb import refuse_clipping
from refimpl.optim.one_bit_lamb import OneBitLamb


class OnebitLamb(OneBitLamb):
    """refimpl's, with DeepSpeed's order of arguments: `deepspeed`, an engine there, is not looked at."""

    def __init__(
        self, params: ParamsT, deepspeed: object = None, lr: float = 1e-3, max_grad_norm: float = 0.0, **options: Any
    ) -> None:
        refuse_clipping("OnebitLamb", max_grad_norm)
        super().__init__(params, lr, **options)
