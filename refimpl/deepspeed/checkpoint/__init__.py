"""Helpers for whoever saves weights by hand."""

from refimpl.deepspeed.checkpoint import utils

__all__ = ["utils"]
