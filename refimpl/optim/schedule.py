"""DeepSpeed's five learning-rate schedules, under the names that a DeepSpeed JSON file gives them."""

from refimpl.optim.cycle import LRRangeTest, OneCycle
from refimpl.optim.schedule_base import Schedule
from refimpl.optim.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "Schedule", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
