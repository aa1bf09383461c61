"""DeepSpeed's path of the topologies and of its grid. DeepSpeed: deepspeed/runtime/pipe/topology.py."""

from refimpl.deepspeed.grid import PipelineParallelGrid, _prime_factors
from refimpl.parallel.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = [
    "PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology",
    "_prime_factors",
]  # fmt: skip
