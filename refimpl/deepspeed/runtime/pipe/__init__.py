"""DeepSpeed's pipeline classes by the paths they are imported from. DeepSpeed: deepspeed/runtime/pipe/__init__.py."""

from refimpl.deepspeed.pipe import LayerSpec, PipelineModule, ProcessTopology, TiedLayerSpec
from refimpl.deepspeed.runtime.pipe import dualpipev, engine, module, schedule, topology

__all__ = [
    "LayerSpec",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
    "dualpipev",
    "engine",
    "module",
    "schedule",
    "topology",
]
