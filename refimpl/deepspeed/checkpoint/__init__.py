"""Helpers for whoever saves weights by hand, and the converter that has nothing left to do."""

from refimpl.deepspeed.checkpoint import ds_to_universal, utils

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"  # a key of client_state that Megatron-DeepSpeed writes

__all__ = ["UNIVERSAL_CHECKPOINT_INFO", "ds_to_universal", "utils"]
