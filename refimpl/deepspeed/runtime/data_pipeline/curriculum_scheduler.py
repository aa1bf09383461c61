"""DeepSpeed: deepspeed/runtime/data_pipeline/curriculum_scheduler.py."""

from refimpl.deepspeed.absent import absent

__all__ = ["CurriculumScheduler"]

CurriculumScheduler = absent(
    "deepspeed.runtime.data_pipeline.curriculum_scheduler.CurriculumScheduler",
    "a curriculum; give initialize data in that order",
)
