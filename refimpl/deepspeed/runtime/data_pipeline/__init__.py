"""Names of DeepSpeed's data efficiency, which Megatron's forks import before they know whether they need them."""

from refimpl.deepspeed.runtime.data_pipeline import curriculum_scheduler, data_routing

__all__ = ["curriculum_scheduler", "data_routing"]
