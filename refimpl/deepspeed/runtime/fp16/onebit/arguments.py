"""The order of arguments in which DeepSpeed's 1-bit optimizers are called, before refimpl's own class."""

from typing import Any

from torch.optim.optimizer import ParamsT

from refimpl.deepspeed.ops.lamb import refuse_clipping


class Arguments:
    """`deepspeed`, an engine there, is not looked at."""

    def __init__(
        self, params: ParamsT, deepspeed: object = None, lr: float = 1e-3, max_grad_norm: float = 0.0, **options: Any
    ) -> None:
        refuse_clipping(type(self).__name__, max_grad_norm)
        super().__init__(params, lr, **options)  # type: ignore[call-arg]
