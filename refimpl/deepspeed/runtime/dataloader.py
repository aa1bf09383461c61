"""Data loading under DeepSpeed's names. DeepSpeed: runtime/dataloader.py; ours: refimpl/engine/dataloader.py."""

from torch.utils.data import DataLoader as DeepSpeedDataLoader  # what an engine makes of training_data

from refimpl.engine.dataloader import RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
