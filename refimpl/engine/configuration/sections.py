"""The honoured keys of a DeepSpeed JSON file, one pydantic model a section, one field a key.

A field is named as DeepSpeed names its key and has DeepSpeed's default; its description says what the key does here.
Keys that are accepted with a warning or rejected by name are not fields: they stand in keys.py beside this file.
Sizes called `*_bucket_size`, `*_threshold`, `*_parameters` and `*_distance` count elements, not bytes.
`zero_optimization` has a file of its own, `zero_sections.py`, and so have the monitors, `monitors.py`, as in DeepSpeed.
DeepSpeed's files: deepspeed/runtime/config.py, runtime/precision_config.py.
"""

from typing import Annotated, Any, Literal, Self

import torch
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from refimpl.engine.configuration.values import (
    Count,
    Dtype,
    Number,
    Positive,
    Section,
    StepOrNone,
    false_is_none,
    of_16_bits,
    upper,
)

POWERS = 127  # 2**127 is fp32's largest power of two


class FP16(Section):
    """Train in fp16 with fp32 master weights and a loss scale."""

    enabled: bool = Field(default=False, description="the model is cast to fp16; master weights stay in fp32")
    loss_scale: Number = Field(default=0.0, le=2.0**POWERS, description="static loss scale; 0 means dynamic")
    initial_scale_power: Count = Field(
        default=16, le=POWERS, description="the dynamic scale starts at 2 to this power; the scaled loss is fp32"
    )
    loss_scale_window: Positive = Field(default=1000, description="good steps before the dynamic scale doubles")
    hysteresis: Positive = Field(default=2, description="the dynamic scale halves at this overflow: 2 endures one")
    consecutive_hysteresis: bool = Field(default=False, description="a good step refills the hysteresis")
    min_loss_scale: Number = Field(
        default=1,
        gt=0,
        le=2.0**POWERS,
        description="an overflow at this dynamic scale ends the run; in stage 0 it warns",
    )
    auto_cast: bool = Field(default=False, description="floating-point inputs are cast to fp16")


class BF16(Section):
    """Train in bf16 with fp32 master weights; bf16 has fp32's range, so there is no loss scale."""

    enabled: bool = Field(default=False, description="the model is cast to bf16; master weights stay in fp32")


class TorchAutocast(Section):
    """Forward runs under torch.autocast: parameters and their gradients keep the model's dtype."""

    enabled: bool = Field(default=False, description="products are computed in `dtype`, sums in fp32, as torch decides")
    dtype: Annotated[Dtype, AfterValidator(of_16_bits)] = Field(
        default=torch.bfloat16, description="bfloat16, or float16 with a dynamic loss scale"
    )


class DataTypes(Section):
    """Dtypes that differ from the model's."""

    grad_accum_dtype: Dtype | None = Field(
        default=None, description="dtype in which micro-batches' gradients are added up"
    )
    param_dtype: Dtype | None = Field(default=None, description="dtype that the parameters are cast to")
    buffer_dtype: Dtype | None = Field(default=None, description="dtype that floating-point buffers are cast to")
    keep_in_fp32_modules: list[str] | None = Field(
        default=None, description="buffers that are fp32 in any case, by parts of names; unset: as transformers' lists"
    )


class Optimizer(Section):
    """The optimizer by name: `refimpl.engine.names` knows the names, `arguments` checks its parameters."""

    type: str = Field(description="Adam, AdamW, Adagrad, Lion, SGD, or a class of torch.optim")
    params: dict[str, Any] = Field(default_factory=dict, description="arguments of the optimizer")


class Scheduler(Section):
    """The learning-rate schedule by name, checked as the optimizer is."""

    type: str = Field(description="a class of refimpl.optim.schedule or of torch.optim.lr_scheduler")
    params: dict[str, Any] = Field(default_factory=dict, description="arguments of the schedule")


class Writer(Section):
    """How a checkpoint is written."""

    decoupled: bool = Field(default=False, description="write in the background; a step waits for the copy alone")


class ActivationCheckpointing(Section):
    """Where the inputs of `checkpoint` wait for backward; `refimpl.engine.activations` applies it."""

    partition_activations: bool = Field(default=False, description="each model-parallel neighbour keeps 1/N of them")
    cpu_checkpointing: bool = Field(default=False, description="they wait in host memory")
    contiguous_memory_optimization: bool = Field(
        default=False, description="they are copied into one arena, of number_checkpoints inputs"
    )
    number_checkpoints: Annotated[Positive | None, BeforeValidator(false_is_none)] = Field(
        default=None, description="layers that are checkpointed in a forward: the size of the arena"
    )
    synchronize_checkpoint_boundary: bool = Field(
        default=False, description="wait for the GPU before and after each run of a checkpointed function"
    )
    profile: bool = Field(default=False, description="rank 0 prints each run's milliseconds")


class TensorParallel(Section):
    """Layers split over ranks; `refimpl.engine.cut` does it."""

    autotp_size: Count = Field(default=0, description="ranks that share every layer; 0 and 1: none")
    partition_config: dict[str, Any] | None = Field(
        default=None, description="which layers are cut by columns or rows, by patterns; unset: found out"
    )


class SparseAttention(Section):
    """The model's self-attention reads a pattern's blocks only; a mode reads the keys that are its own.

    A causal model stays causal, whatever `attention` says. The same blocks are drawn on every rank.
    """

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "local"] = Field(
        default="fixed", description="the pattern"
    )
    block: Positive = Field(default=16, description="tokens in a block's side")
    different_layout_per_head: bool = Field(default=False, description="each head has its own blocks")
    num_local_blocks: Positive = Field(default=4, description="fixed: blocks in a stretch that reads itself")
    num_global_blocks: Count = Field(default=1, description="fixed: blocks of a stretch that all read; bigbird: first")
    attention: Literal["unidirectional", "bidirectional"] = Field(
        default="bidirectional", description="unidirectional: no block of keys after the block of queries"
    )
    horizontal_global_attention: bool = Field(default=False, description="global blocks read all, too")
    num_different_global_patterns: Positive = Field(default=1, description="fixed: heads differ in what is global")
    num_random_blocks: Count = Field(default=0, description="variable, bigbird: drawn for each row")
    local_window_blocks: list[Positive] = Field(default=[4], description="variable: lengths of the stretches")
    global_block_indices: list[Count] = Field(default=[0], description="variable, bslongformer: blocks that all read")
    global_block_end_indices: list[Count] | None = Field(default=None, description="the (exclusive) ends, of ranges")
    num_sliding_window_blocks: Positive = Field(default=3, description="bigbird, bslongformer, local: the window")


class ExpertParallel(Section):
    """Experts dealt out over ranks; `refimpl.engine.experts` does it."""

    enabled: bool = Field(default=False, description="deal out the experts of every mixture in the model")
    autoep_size: Positive = Field(default=1, description="data-parallel ranks that share the experts of a layer")


class Pipeline(Section):
    """Layers dealt out over ranks."""

    stages: Positive | None = Field(
        default=None, description="ranks that share a plain model's layers; of a PipelineModule its own argument counts"
    )

    activation_checkpoint_interval: int = Field(
        default=0, ge=0, description="layers of a PipelineModule recomputed together; 0: as the module was told"
    )


class Elasticity(Section):
    """One batch for many numbers of ranks; elasticity.py beside this file reads it. Not read where it is off."""

    enabled: bool = Field(default=False, description="choose the batch that the most numbers of ranks share")
    max_train_batch_size: Positive = Field(description="the batch is at most this")
    micro_batch_sizes: Annotated[list[Positive], Field(min_length=1)] = Field(
        description="train_micro_batch_size_per_gpu is one of these, the largest that fits"
    )
    min_gpus: Positive = Field(default=1, description="ranks, at least")
    max_gpus: Positive = Field(default=10_000, description="ranks, at most")
    prefer_larger_batch: bool = Field(
        default=True, description="of two batches that as many numbers share the larger; false: the smaller"
    )
    version: Number = Field(default=0.2, description="0.1: ranks one by one; 0.2: whole machines")
    num_gpus_per_node: Positive = Field(default=1, description="version 0.2: ranks of a machine")
    model_parallel_size: Positive = Field(default=1, description="version 0.2: ranks that share a model, and its data")
    ignore_non_elastic_batch_info: bool = Field(
        default=False, description="sizes of batches that stand outside this section have no effect; false: an error"
    )

    @model_validator(mode="after")
    def check_together(self) -> Self:
        """What DeepSpeed refuses, by name."""
        if self.version not in (0.1, 0.2):
            raise ValueError(f"elasticity.version = {self.version:g}: must be 0.1 or 0.2")
        if self.max_gpus < self.min_gpus:
            raise ValueError(f"elasticity.max_gpus = {self.max_gpus}: less than min_gpus = {self.min_gpus}")
        if self.version == 0.1 and self.model_parallel_size > 1:
            raise ValueError(
                f"elasticity.model_parallel_size = {self.model_parallel_size}: version 0.1 has none; set "
                "elasticity.version to 0.2"
            )
        if self.version == 0.2 and self.num_gpus_per_node % self.model_parallel_size:
            raise ValueError(
                f"elasticity.num_gpus_per_node = {self.num_gpus_per_node}: must be a multiple of model_parallel_size = "
                f"{self.model_parallel_size}"
            )
        return self


class Checkpoint(Section):
    """How checkpoints are checked and written."""

    tag_validation: Annotated[Literal["IGNORE", "WARN", "FAIL"], BeforeValidator(upper)] = Field(
        default="WARN", description="what to do when ranks name different checkpoint tags"
    )
    load_universal: bool = Field(default=False, description="every load goes to any stage and world size")
    writer: Writer = Field(default_factory=Writer, description="how checkpoints are written")


class CommsLogger(Section):
    """Log the size and latency of every collective; `deepspeed.comm.log_summary()` prints the table."""

    enabled: bool = Field(default=False, description="log collectives; each is waited for at once, nothing overlaps")
    verbose: bool = Field(default=False, description="rank 0 prints each one, too")
    prof_all: bool = Field(default=True, description="log all of them; false: those that prof_ops names")
    prof_ops: list[str] = Field(
        default_factory=list, description="names of collectives, of the ledger's tags, or a call's own log_name"
    )
    debug: bool = Field(default=False, description="name the function that called")


class FlopsProfiler(Section):
    """Rank 0 counts the FLOPs of one forward pass by module, and prints them."""

    enabled: bool = Field(default=False, description="print a table of FLOPs once, in the step that profile_step names")
    profile_step: StepOrNone = Field(default=1, description="updates behind which it is printed; -1 is none")
    module_depth: int = Field(default=-1, description="down to which depth modules are shown; -1 is all")
    top_modules: Positive = Field(default=1, description="without `detailed`, how many of each depth: the largest")
    detailed: bool = Field(default=True, description="show every module")
    output_file: str | None = Field(default=None, description="a file in place of rank 0's stdout")
    recompute_fwd_factor: Number = Field(default=0.0, ge=0, description="of the forward pass what backward repeats")
