"""The honoured keys of a DeepSpeed JSON file at its top level, and what all of it becomes for the components.

The sections below are in `sections`, `zero_sections` and `monitors`. Homes and ZeRO++ join the stage's configuration in
engine/homes.py and build.py, where the ranks and the device are known. DeepSpeed's file: deepspeed/runtime/config.py.
"""

from typing import Annotated, Literal, Self

import torch
from pydantic import BeforeValidator, Field, model_validator

from refimpl.engine.autotuning import Autotuning
from refimpl.engine.configuration import sections as section
from refimpl.engine.configuration import values as value
from refimpl.engine.configuration.compression import GradientCompression
from refimpl.engine.configuration.compression_training import CompressionTraining
from refimpl.engine.configuration.monitors import Comet, CSVMonitor, Monitors, TensorBoard, WandB
from refimpl.engine.configuration.quote import quote
from refimpl.engine.configuration.zero_sections import AsyncIO, ZeroOptimization
from refimpl.engine.curriculum import Curriculum, LayerDrop
from refimpl.engine.names import ONE_BIT
from refimpl.optim.loss_scale import DynamicLossScaler, LossScaler
from refimpl.zero.config import ZeroConfig


class DeepSpeedConfig(value.Section):
    """Every honoured key of a DeepSpeed configuration, resolved for one world size. Made by `load_config`.

    Defaults are DeepSpeed's. One of them is easily overlooked: since 0.19.3 (#8068) gradients are clipped at a global
    norm of 1.0 where `gradient_clipping` is not set, in every stage and precision; 0 turns it off.
    """

    train_batch_size: value.Positive = Field(description="samples an optimizer step, over all ranks")
    train_micro_batch_size_per_gpu: value.Positive = Field(description="samples a rank feeds to one forward")
    gradient_accumulation_steps: value.Positive = Field(description="micro-batches a rank adds up before a step")
    managed_gradient_accumulation: bool = Field(
        default=True, description="the engine counts micro-batches; false: every step() is an optimizer step"
    )
    dataloader_drop_last: bool = Field(default=False, description="the dataloader drops the last incomplete batch")
    disable_python_gc: bool = Field(
        default=False, description="Python looks for garbage in cycles when engine.collect_python_gc() is called"
    )

    steps_per_print: Annotated[value.Positive | None, BeforeValidator(value.never)] = Field(
        default=None, description="steps between reports; unset: none"
    )
    gradient_clipping: value.Number = Field(
        default=1.0, description="bound on the global L2 norm; 0 means off, unset is 1.0, as in DeepSpeed since 0.19.3"
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(value.lower)] = Field(
        default="mean", description="what a gradient over ranks is"
    )
    gradient_compression: GradientCompression | None = Field(
        default=None, description="gradients travel compressed; DeepSpeed has no such key"
    )
    prescale_gradients: bool = Field(default=False, description="divide before the reduction instead of after it")
    gradient_predivide_factor: value.Number = Field(
        default=1.0, gt=0, description="without prescale: divide by this before, by the rest after"
    )
    communication_data_type: value.Dtype | None = Field(
        default=None, description="dtype on the wire; unset: data_types.grad_accum_dtype, or the model's"
    )
    seq_parallel_communication_data_type: value.Dtype | None = Field(
        default=None, description="the same where ranks share sequences; unset: as that (in DeepSpeed fp32)"
    )
    data_types: section.DataTypes = Field(
        default_factory=section.DataTypes, description="dtypes apart from the model's"
    )
    zero_allow_untested_optimizer: bool = Field(
        default=False, description="try an optimizer that is not known, and cut it if it does the same on parts"
    )
    wall_clock_breakdown: bool = Field(default=False, description="report forward, backward and step in milliseconds")
    memory_breakdown: bool = Field(default=False, description="report live bytes by class")
    dump_state: bool = Field(default=False, description="print this configuration at the start")
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None, BeforeValidator(value.upper)
    ] = Field(default=None, description="level of the loggers `refimpl` and `DeepSpeed`")

    fp16: section.FP16 = Field(default_factory=section.FP16, description="mixed precision with a loss scale")
    bf16: section.BF16 = Field(default_factory=section.BF16, description="mixed precision without a loss scale")
    torch_autocast: section.TorchAutocast = Field(
        default_factory=section.TorchAutocast, description="forward in 16 bits, with parameters as they are"
    )
    optimizer: section.Optimizer | None = Field(default=None, description="the optimizer by name")
    scheduler: section.Scheduler | None = Field(default=None, description="the learning-rate schedule by name")
    zero_optimization: ZeroOptimization = Field(
        default_factory=ZeroOptimization, description="what is sharded over the ranks"
    )
    aio: AsyncIO = Field(default_factory=AsyncIO, description="how a disk is driven")
    activation_checkpointing: section.ActivationCheckpointing = Field(
        default_factory=section.ActivationCheckpointing, description="where inputs of activation checkpoints wait"
    )
    tensor_parallel: section.TensorParallel = Field(
        default_factory=section.TensorParallel, description="ranks that share every layer"
    )
    expert_parallel: section.ExpertParallel = Field(
        default_factory=section.ExpertParallel, description="data-parallel ranks that share the experts of a layer"
    )
    sequence_parallel_size: value.Positive = Field(default=1, description="ranks that share every sequence")
    data_parallel_size: value.Positive | None = Field(
        default=None, description="ranks that read other batches; checked: it follows from the number of ranks"
    )
    sparse_attention: section.SparseAttention | None = Field(
        default=None, description="which blocks of keys the model's attention reads"
    )
    compression_training: CompressionTraining = Field(
        default_factory=CompressionTraining, description="what the model is trained to do without"
    )
    progressive_layer_drop: LayerDrop = Field(
        default_factory=LayerDrop, description="layers that the model drops by and by"
    )
    curriculum_learning: Curriculum = Field(
        default_factory=Curriculum, description="a difficulty that grows, such as the length of sequences"
    )
    elasticity: section.Elasticity | None = Field(
        default=None, description="one batch for many numbers of ranks; the three sizes are not given then"
    )
    pipeline: section.Pipeline = Field(default_factory=section.Pipeline, description="ranks that share the layers")
    checkpoint: section.Checkpoint = Field(default_factory=section.Checkpoint, description="checks of checkpoints")
    flops_profiler: section.FlopsProfiler = Field(
        default_factory=section.FlopsProfiler, description="FLOPs of one forward pass, by module"
    )
    autotuning: Autotuning = Field(default_factory=Autotuning, description="what `--autotuning` of the launcher tries")
    comms_logger: section.CommsLogger = Field(
        default_factory=section.CommsLogger, description="latencies of collectives"
    )
    csv_monitor: CSVMonitor = Field(default_factory=CSVMonitor, description="metrics as CSV files")
    tensorboard: TensorBoard = Field(default_factory=TensorBoard, description="metrics for TensorBoard")
    wandb: WandB = Field(default_factory=WandB, description="metrics for Weights & Biases")
    comet: Comet = Field(default_factory=Comet, description="metrics for Comet")

    @model_validator(mode="after")
    def check_precision(self) -> Self:
        """fp16 and bf16 exclude each other, and a dtype beside them: DeepSpeed refuses that, too."""
        if self.fp16.enabled and self.bf16.enabled:
            raise ValueError("fp16.enabled and bf16.enabled are both true; a model has one dtype, disable one of them")
        section, dtype = ("fp16", torch.float16) if self.fp16.enabled else ("bf16", torch.bfloat16)
        if (self.fp16.enabled or self.bf16.enabled) and self.data_types.param_dtype not in (None, dtype):
            raise ValueError(
                f"data_types.param_dtype is {self.data_types.param_dtype}, and {section}.enabled is true; a model has "
                "one dtype, leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def check_one_bit(self) -> Self:
        """What averages its momentum by itself needs all of it on every rank, as in DeepSpeed."""
        stage, name = self.zero_optimization.stage, "" if self.optimizer is None else self.optimizer.type
        if name.lower() in ONE_BIT and stage > 0:
            raise ValueError(
                f"optimizer.type = {quote(name)}: every rank averages and keeps all of the momentum: "
                f"zero_optimization.stage must be 0, not {stage}"
            )
        if name.lower() in ONE_BIT and self.gradient_compression is not None:
            raise ValueError(
                f"gradient_compression: optimizer.type = {quote(name)} compresses by itself; keep one of the two"
            )
        return self

    @model_validator(mode="after")
    def check_compression(self) -> Self:
        """An error is as large as a whole gradient, which no rank keeps from stage 2 on."""
        if self.gradient_compression is not None and self.zero_optimization.stage > 1:
            raise ValueError(
                f"gradient_compression: zero_optimization.stage {self.zero_optimization.stage} keeps no whole "
                "gradient, and error feedback needs one: use stage 0 or 1, or zero_quantized_gradients in stage 3"
            )
        return self

    @property
    def monitor_config(self) -> Monitors:
        """The four sections of metrics, under the name by which DeepSpeed's scripts ask for them."""
        return Monitors(tensorboard=self.tensorboard, wandb=self.wandb, csv_monitor=self.csv_monitor, comet=self.comet)

    @property
    def dtype(self) -> torch.dtype:
        """What the model's parameters are cast to: `data_types.param_dtype`, or as fp16 and bf16 say, or fp32."""
        if self.data_types.param_dtype is not None:
            return self.data_types.param_dtype
        return torch.float16 if self.fp16.enabled else torch.bfloat16 if self.bf16.enabled else torch.float32

    def loss_scaler(self) -> LossScaler | None:
        """The scaler that fp16 asks for, static or dynamic, or autocast to float16; None without these.

        At its minimum a dynamic one ends the run in stages 1 to 3; stage 0 goes on skipping, as DeepSpeed's does.
        """
        fp16, autocast = self.fp16, self.torch_autocast
        if not fp16.enabled:
            return DynamicLossScaler() if autocast.enabled and autocast.dtype == torch.float16 else None
        if fp16.loss_scale > 0:
            return LossScaler(fp16.loss_scale)
        return DynamicLossScaler(
            initial_scale=2.0**fp16.initial_scale_power,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            min_scale=fp16.min_loss_scale,
            raise_at_min=self.zero_optimization.stage > 0,
        )

    def zero_config(self) -> ZeroConfig:
        """The stage's own small configuration."""
        zero = self.zero_optimization
        cast = self.fp16.enabled or self.bf16.enabled or self.data_types.param_dtype is not None
        return ZeroConfig(
            dtype=self.dtype if cast else None,  # without fp16, bf16 or data_types a model keeps its own
            reduce_bucket_size=max(1, zero.reduce_bucket_size),  # a tensor larger than a bucket has its own
            allgather_bucket_size=max(1, zero.allgather_bucket_size),
            overlap_comm=zero.stage == 3 if zero.overlap_comm is None else zero.overlap_comm,
            gradient_clipping=self.gradient_clipping,
            communication_data_type=self.communication_data_type,
            compression=self.gradient_compression.compression() if self.gradient_compression else None,
            grad_accum_dtype=self.data_types.grad_accum_dtype,
            gradient_allreduce_op=self.gradient_allreduce_op,
            prescale_gradients=self.prescale_gradients,
            gradient_predivide_factor=self.gradient_predivide_factor,
            ignore_unused_parameters=zero.ignore_unused_parameters,
            allow_untested_optimizer=self.zero_allow_untested_optimizer,
            prefetch_bucket_size=zero.stage3_prefetch_bucket_size,
            param_persistence_threshold=zero.stage3_param_persistence_threshold,
            model_persistence_threshold=zero.stage3_model_persistence_threshold,
            max_live_parameters=zero.stage3_max_live_parameters,
            max_reuse_distance=zero.stage3_max_reuse_distance,
            module_granularity_threshold=zero.stage3_module_granularity_threshold,
        )
