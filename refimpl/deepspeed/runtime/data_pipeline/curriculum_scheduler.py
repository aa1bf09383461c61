"""DeepSpeed: deepspeed/runtime/data_pipeline/curriculum_scheduler.py."""

from refimpl.optim.curriculum import CurriculumScheduler

__all__ = ["CurriculumScheduler"]
