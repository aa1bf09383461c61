"""`zero_optimization` and its sections, one pydantic model a section: see `sections.py` for what a field is.

DeepSpeed: deepspeed/runtime/zero/config.py and offload_config.py, deepspeed/runtime/swap_tensor/aio_config.py.
"""

import sys
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from refimpl.engine.configuration.values import (
    Count,
    Names,
    Positive,
    Section,
    as_number,
    or_none,
    rounded_down,
    unless_off,
)


class LeafModule(Section):
    """Modules that stage 3 gathers whole, without hooks on their children."""

    classes: Names = Field(default_factory=list, description="class names of modules gathered as one unit")
    names: Names = Field(default_factory=list, description="paths of modules gathered as one unit")
    name_suffixes: Names = Field(default_factory=list, description="ends of such paths")


class OffloadOptimizer(Section):
    """Where fp32 masters and optimizer states rest, and are updated."""

    device: Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(or_none)] = Field(
        default="none", description="none: on the device; cpu: in the host's memory; nvme: in a file of each rank"
    )
    nvme_path: str | None = Field(default=None, description="folder of that file; made if it is not there")
    buffer_count: Positive = Field(default=4, description="parts of the state that may be in memory at once, with nvme")
    pipeline_read: bool = Field(default=False, description="the next part is read while one is updated")
    pipeline_write: bool = Field(default=False, description="the part before is written while one is updated")
    ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0, description="the share of the parameters that is offloaded, bucket by bucket"
    )
    delayed_update: bool = Field(
        default=False,
        description="(not DeepSpeed's) the update runs beside the next step, whose weights lack it; with cpu or nvme",
    )


class OffloadParam(Section):
    """Where the shards of stage 3's parameters rest."""

    device: Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(or_none)] = Field(
        default="none", description="none: on the device; cpu: in the host's memory; nvme: in a file of each rank"
    )
    nvme_path: str | None = Field(default=None, description="folder of that file; made if it is not there")
    buffer_count: Positive = Field(default=5, description="shards that may be read ahead of their use, with nvme")
    buffer_size: Positive = Field(
        default=100_000_000, description="elements of a buffer: no unit's shard may be larger"
    )
    max_in_cpu: Count = Field(default=1_000_000_000, description="elements that stay in memory all the same, with nvme")


class AsyncIO(Section):
    """How a disk is driven."""

    block_size: Positive = Field(default=1_048_576, description="bytes of one request")
    queue_depth: Positive = Field(default=8, description="requests under way at once, of each thread")
    intra_op_parallelism: Positive = Field(default=1, description="threads a transfer")
    overlap_events: bool = Field(default=True, description="false: one request at a time")


class LoCoParam(Section):
    """How what quantised gradients lose comes back."""

    err_beta: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.8, description="how much of the error so far stays in its moving average"
    )
    reset_T: Positive = Field(default=1024, description="steps after which the error is dropped")


class ZeroOptimization(Section):
    """What is sharded and how it is communicated."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(as_number)] = Field(
        default=0, description="0 nothing, 1 optimizer, 2 + gradients, 3 + parameters sharded"
    )
    reduce_bucket_size: Count = Field(
        default=500_000_000, description="elements reduced in one collective; 0: one gradient at a time"
    )
    allgather_bucket_size: Count = Field(
        default=500_000_000, description="elements gathered in one collective; 0: one parameter at a time"
    )
    overlap_comm: bool | None = Field(default=None, description="reduce during backward; unset means only in stage 3")
    stage3_prefetch_bucket_size: Annotated[Count, BeforeValidator(rounded_down)] = Field(
        default=50_000_000, description="elements gathered ahead of use"
    )
    stage3_param_persistence_threshold: Count = Field(default=100_000, description="smaller parameters stay gathered")
    stage3_model_persistence_threshold: Count = Field(
        default=sys.maxsize, description="bound on all that stays gathered"
    )
    stage3_max_live_parameters: Count = Field(default=1_000_000_000, description="gathered elements at one time")
    stage3_max_reuse_distance: Count = Field(
        default=1_000_000_000, description="kept when used again this soon, in elements"
    )
    stage3_gather_16bit_weights_on_model_save: bool = Field(
        default=False, description="save_16bit_model may gather weights"
    )
    stage3_module_granularity_threshold: Count = Field(
        default=0, description="gather whole what has fewer parameters for each module inside"
    )
    sub_group_size: Count = Field(
        default=1_000_000_000, description="elements that are brought from a disk and updated at a time; 0: 4 million"
    )
    offload_optimizer: Annotated[OffloadOptimizer, BeforeValidator(unless_off)] = Field(
        default_factory=OffloadOptimizer, description="where optimizer states rest"
    )
    offload_param: Annotated[OffloadParam, BeforeValidator(unless_off)] = Field(
        default_factory=OffloadParam, description="where stage 3's parameters rest"
    )
    mics_shard_size: int = Field(
        default=-1, description="ranks that state is divided over; the others hold the same; -1: over all"
    )
    mics_hierarchical_params_gather: bool = Field(
        default=False, description="gather between nodes first, then inside them; without mics_shard_size too"
    )
    zero_quantized_weights: bool = Field(default=False, description="gathers of parameters carry int8")
    zero_quantized_nontrainable_weights: bool = Field(
        default=False, description="shards of frozen parameters rest as int8, and travel so"
    )
    zero_hpz_partition_size: Count = Field(
        default=1, description="neighbours that share a second shard, gathered from until the next update; 0: as 1"
    )
    zero_quantized_gradients: bool = Field(
        default=False, description="gradients are reduced in two hops of int4, inside nodes and between them"
    )
    zeropp_loco_param: LoCoParam | None = Field(default=None, description="what quantised gradients lose comes back")
    ignore_unused_parameters: bool = Field(
        default=True, description="unused on one rank: zeros in the mean; false: an error"
    )
    leaf_module: LeafModule = Field(default_factory=LeafModule, description="modules gathered as one unit")
