"""Random layerwise token dropping, by name."""

from refimpl.deepspeed.runtime.data_pipeline.data_routing import helper

__all__ = ["helper"]
