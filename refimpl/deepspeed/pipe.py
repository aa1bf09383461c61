"""DeepSpeed's pipeline classes by name; pipeline parallelism is not implemented yet. DeepSpeed: deepspeed/pipe."""

from refimpl.deepspeed.later import later

PipelineModule = later("deepspeed.pipe.PipelineModule", "pipeline parallelism")
LayerSpec = later("deepspeed.pipe.LayerSpec", "pipeline parallelism")
TiedLayerSpec = later("deepspeed.pipe.TiedLayerSpec", "pipeline parallelism")
ProcessTopology = later("deepspeed.pipe.ProcessTopology", "pipeline parallelism")
