"""Activations computed twice instead of kept."""

from refimpl.deepspeed.runtime.activation_checkpointing import checkpointing

__all__ = ["checkpointing"]
