"""The loss scalers under DeepSpeed's path. DeepSpeed: deepspeed/runtime/fp16/loss_scaler.py."""

from refimpl.optim.loss_scale import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler"]
