"""DeepSpeed's path of the module and its layers. DeepSpeed: deepspeed/runtime/pipe/module.py."""

from refimpl.deepspeed.pipe import LayerSpec, PipelineError, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]
