"""DeepSpeed's pipeline classes by name. DeepSpeed: deepspeed/pipe.

Layer specifications and topologies are there. `PipelineModule` under DeepSpeed's engine is not yet: a pipeline is
trained by `refimpl.parallel.pipeline.module.PipelineModule`, over replicas with a stage of `refimpl.zero`.
"""

from refimpl.deepspeed.later import later
from refimpl.parallel.pipeline.layers import LayerSpec, TiedLayerSpec
from refimpl.parallel.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
]

PipelineModule = later("deepspeed.pipe.PipelineModule", "pipeline parallelism under DeepSpeed's engine")
