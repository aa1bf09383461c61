"""fp16's loss scale on its way into a backward, and what is told where a loss came without it."""

from torch import Tensor

from refimpl.optim.loss_scale import LossScaler


class Scaled:
    """Of one stage; without a scaler nothing is scaled, and nothing missing."""

    def __init__(self, scaler: LossScaler | None) -> None:
        self.scaler = scaler
        self.is_asked = False  # for the backward to come
        self.is_missing = False  # whether gradients arrived that are of no scaled loss

    def __call__(self, loss: Tensor) -> Tensor:
        """loss times the loss scale, fp32."""
        self.is_asked = True
        return loss.float() * self.scaler.scale if self.scaler else loss

    def end_backward(self, arrived: bool) -> None:
        """`arrived`: whether a gradient did."""
        self.is_missing |= self.scaler is not None and not self.is_asked and arrived
        self.is_asked = False

    def error(self) -> RuntimeError:
        """Of a step with such gradients."""
        return RuntimeError(
            "step(): a gradient of fp16 came from a loss without its loss scale: call engine.backward(loss), or "
            "scale(loss).backward() in place of loss.backward(); zero_grad() drops what is there"
        )
