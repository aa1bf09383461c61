"""DeepSpeed's path of the topologies. DeepSpeed: deepspeed/runtime/pipe/topology.py."""

from refimpl.parallel.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"]
