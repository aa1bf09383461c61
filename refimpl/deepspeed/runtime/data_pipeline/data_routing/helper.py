"""DeepSpeed: deepspeed/runtime/data_pipeline/data_routing/helper.py."""

from refimpl.deepspeed.absent import absent

__all__ = ["convert_to_random_ltd", "remove_random_ltd_state_dict", "save_without_random_ltd"]

convert_to_random_ltd, remove_random_ltd_state_dict, save_without_random_ltd = (
    absent(f"deepspeed.runtime.data_pipeline.data_routing.helper.{name}", "the model drops its tokens itself")
    for name in __all__
)
