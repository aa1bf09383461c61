"""Data loading under DeepSpeed's names. DeepSpeed: runtime/dataloader.py; ours: refimpl/engine/dataloader.py."""

from refimpl.engine.dataloader import RepeatingLoader

__all__ = ["RepeatingLoader"]
