"""A loss scale lifts small fp16 gradients above fp16's smallest number, 2**-24, and comes down when one overflows.

The loss is multiplied by `scale` before backward and the gradients are divided by it before the update. A step whose
gradients hold an Inf or NaN is skipped and lowers a dynamic scale; a long run of good steps raises it again, so the
scale rides just below overflow. It costs no memory and no traffic: the flag is part of the step's own check.
Mixed Precision Training, arXiv:1710.03740, section 3.2. DeepSpeed's file: deepspeed/runtime/fp16/loss_scaler.py.
"""

from typing import Any


class LossScaler:
    """A static scale: never changes, whatever overflows."""

    def __init__(self, scale: float = 1.0) -> None:
        if not 0 < scale < float("inf"):
            raise ValueError(f"loss scale must be positive and finite, not {scale}")
        self.scale = float(scale)
        self.held = False

    def hold(self, scale: float) -> None:
        """From now on this scale, whatever overflows, until the next call: the caller has a scaler of his own."""
        LossScaler.__init__(self, scale)
        self.held = True

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow is of use: after it, or after a few, the scale is smaller (or the caller's own)."""
        return self.held

    def update(self, overflow: bool) -> None:
        """Tell the scaler how the step went: `overflow` is True when it was skipped on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that later scales depend on."""
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.scale = float(state["scale"])


class DynamicLossScaler(LossScaler):
    """Halves on overflow, once `hysteresis` is used up; doubles on the good step after every `window` good ones.

    `hysteresis` - 1 overflows are endured and the next one halves the scale (1: the first one does). Once used up it
    stays used up, so that every further overflow halves, until it is refilled: by a doubling, or, with
    `consecutive_hysteresis`, by any good step. An overflow that would halve `min_scale` raises `OverflowError`, or,
    without `raise_at_min`, leaves it.
    """

    def __init__(
        self,
        initial_scale: float = 2.0**16,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
        raise_at_min: bool = True,
    ) -> None:
        super().__init__(initial_scale)
        if window < 1 or hysteresis < 1 or min_scale <= 0:
            raise ValueError(f"{window=} and {hysteresis=} must be at least 1 and {min_scale=} above 0")
        self.window = window
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.min_scale = float(min_scale)
        self.raise_at_min = raise_at_min
        self.left = hysteresis  # the overflow that finds 1 left halves
        self.good_steps = 0  # since the last overflow

    @property
    def can_shrink(self) -> bool:
        return self.held or self.scale > self.min_scale

    def update(self, overflow: bool) -> None:
        """Tell the scaler how the step went; raises `OverflowError` when the scale can go no lower."""
        if self.held:
            return
        if overflow:
            self._shrink()
            self.good_steps = 0
            return
        if self.consecutive_hysteresis:
            self.left = self.hysteresis
        if self.good_steps and self.good_steps % self.window == 0:
            self.left = self.hysteresis
            self.scale *= 2
        self.good_steps += 1

    def _shrink(self) -> None:
        if self.left > 1:
            self.left -= 1
        elif self.raise_at_min and not self.can_shrink:
            raise OverflowError(
                f"gradients overflow although the loss scale is at its minimum {self.min_scale:g}: the loss itself is "
                "not finite. Lower the learning rate, clip gradients, use bf16, or lower fp16.min_loss_scale"
            )
        else:
            self.scale = max(self.scale / 2, self.min_scale)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later scales depend on."""
        return {"scale": self.scale, "left": self.left, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.scale, self.left, self.good_steps = float(state["scale"]), int(state["left"]), int(state["good_steps"])
