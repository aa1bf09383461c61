"""The knobs of a stage, under DeepSpeed's names (deepspeed/runtime/zero/config.py) without its `stage3_` prefix.

Sizes are in elements, as in DeepSpeed. The defaults suit a plain training loop on a small machine: they keep least
memory. `refimpl.engine` sets DeepSpeed's own defaults from its JSON.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from refimpl.compress.compression import Compression
from refimpl.offload.homes import Disk, Host

PLUS = (
    "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_hpz_partition_size",
    "zero_quantized_gradients", "zeropp_loco_param", "mics_hierarchical_params_gather",
)  # fmt: skip


@dataclass(frozen=True)
class LoCo:
    """How what quantised gradients lose is kept: see `refimpl.zero.reduction.loco`."""

    err_beta: float = 0.8  # how much of the error so far stays in its moving average
    reset_T: int = 1024  # steps after which the error is dropped

    def __post_init__(self) -> None:
        if not 0 <= self.err_beta < 1:
            raise ValueError(f"zeropp_loco_param.err_beta = {self.err_beta}: must be at least 0 and less than 1")
        if not isinstance(self.reset_T, int) or self.reset_T < 1:
            raise ValueError(f"zeropp_loco_param.reset_T = {self.reset_T}: must be at least 1 step, whole")


@dataclass(frozen=True)
class ZeroConfig:
    """Every stage reads the first part; only ZeRO-3 reads the second."""

    reduce_bucket_size: int = 5_000_000  # elements reduced at a time
    allgather_bucket_size: int = 5_000_000  # elements gathered at a time after a step
    overlap_comm: bool = True  # reduce while backward still computes
    gradient_clipping: float = 0.0  # largest global L2 norm; 0 does not clip
    communication_data_type: torch.dtype | None = None  # dtype of gradients on the wire; None: that of the sums
    compression: Compression | None = None  # gradients travel compressed (DDP, ZeRO-1); None: as they are
    grad_accum_dtype: torch.dtype | None = None  # dtype of accumulated gradients; None: the model's
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"  # what a gradient over ranks is
    prescale_gradients: bool = False  # divide by N before the reduction, not after
    gradient_predivide_factor: float = 1.0  # without prescale: divide by f before the reduction, by N / f after
    ignore_unused_parameters: bool = True  # False: a parameter without a gradient is an error
    allow_untested_optimizer: bool = False  # cut one that is not known to be element-wise, if a trial shows that it is
    dtype: torch.dtype | None = None  # cast parameters to it; fp32 masters keep what this rounds off
    broadcast_buffers: bool = True  # rank 0's buffers on every rank before each training forward
    optimizer_home: Host | None = None  # where masters and optimizer state rest; None: on the device
    gradient_home: Host | None = None  # where shards of gradients wait for the step (ZeRO-2, 3); None: on the device
    sub_group_size: int = 4_194_304  # elements that are brought from a home and updated at a time
    delayed_update: bool = False  # a step's update runs beside the next one, and is used one step late
    offload_ratio: float = 1.0  # the share of the elements that rests there, bucket by bucket

    prefetch_bucket_size: int = 5_000_000  # elements gathered ahead of their use; one unit may be larger; 0: none
    param_persistence_threshold: int = 0  # parameters this small stay gathered
    model_persistence_threshold: int = 2**63 - 1  # ... up to this many in all
    max_live_parameters: int = 1_000_000_000  # no prefetch beyond this many gathered elements
    max_reuse_distance: int = 0  # keep what is used again before this many elements are gathered; 0 keeps nothing
    leaf_modules: tuple[type | str, ...] = ()  # modules gathered whole: classes, class names or ends of paths
    gather_blocks: bool | None = None  # gather whole what a ModuleList repeats; None: on a GPU
    unit_size: int = 0  # elements: neighbours are gathered as one up to this many; 0: each module by itself
    module_granularity_threshold: int = 0  # gather whole what has fewer parameters for each module inside
    parameter_home: Host | None = None  # where sharded parameters rest; None: on the device
    max_in_host: int = 0  # elements of shards that stay in the host's memory all the same, beside a disk
    zero_quantized_weights: bool = False  # gathers carry int8
    zero_quantized_nontrainable_weights: bool = False  # frozen shards rest as int8, and travel so
    zero_hpz_partition_size: int = 1  # neighbours that share a second shard, gathered from until the next update
    zero_quantized_gradients: bool = False  # two hops of int4 in place of a reduce-scatter
    zeropp_loco_param: LoCo | None = None  # what those lose comes back
    mics_hierarchical_params_gather: bool = False  # gather between nodes first, then inside
    check_order: bool = True  # name ranks that take different paths; costs a message where a path is new

    def __post_init__(self) -> None:
        for name in ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"ZeroConfig.{name} = {getattr(self, name)}: must be at least 1 element, whole")
        if self.compression is not None and not isinstance(self.compression, Compression):
            raise TypeError(f"ZeroConfig.compression = {self.compression!r}: give Compression(TopK(0.01)), or None")
        self._check_homes()
        self._check_plus()
        if self.parameter_home is not None and self.optimizer_home is None:
            raise ValueError("ZeroConfig.parameter_home needs an optimizer_home: what is updated must rest somewhere")
        if self.gradient_home is not None and self.optimizer_home is None:
            raise ValueError("ZeroConfig.gradient_home needs an optimizer_home: gradients wait for an update there")
        if isinstance(self.gradient_home, Disk) and not isinstance(self.optimizer_home, Disk):
            raise ValueError("ZeroConfig.gradient_home = Disk needs a Disk as optimizer_home: they are read together")
        if self.delayed_update:
            self._check_delayed()
        if not self.gradient_clipping >= 0:  # NaN is not, either
            raise ValueError(f"ZeroConfig.gradient_clipping = {self.gradient_clipping}: must not be negative")
        if self.gradient_allreduce_op not in ("mean", "sum"):
            raise ValueError(f"ZeroConfig.gradient_allreduce_op = {self.gradient_allreduce_op!r}: must be mean or sum")
        if isinstance(self.leaf_modules, str):
            raise TypeError(f"ZeroConfig.leaf_modules = {self.leaf_modules!r}: give several, ({self.leaf_modules!r},)")
        if self.gradient_predivide_factor <= 0:
            raise ValueError(f"ZeroConfig.gradient_predivide_factor = {self.gradient_predivide_factor}: must be > 0")

    def homes(self) -> set[Host]:
        """Where anything rests."""
        return {home for home in (self.optimizer_home, self.gradient_home, self.parameter_home) if home is not None}

    def _check_homes(self) -> None:
        for name in ("optimizer_home", "gradient_home", "parameter_home"):
            home = getattr(self, name)
            if home is not None and not isinstance(home, Host):
                raise ValueError(f"ZeroConfig.{name} = {home!r}: give Host() or Disk(folder), or None")
        if not 0 <= self.offload_ratio <= 1:
            raise ValueError(f"ZeroConfig.offload_ratio = {self.offload_ratio}: must be between 0 and 1")
        if self.max_in_host < 0:
            raise ValueError(f"ZeroConfig.max_in_host = {self.max_in_host}: must not be negative")

    def asks_for_plus(self) -> list[str]:
        """The keys of ZeRO++ and MiCS that are set, by name."""
        return [name for name in PLUS if getattr(self, name) != getattr(ZeroConfig, name)]

    def _check_plus(self) -> None:
        size = self.zero_hpz_partition_size
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"ZeroConfig.zero_hpz_partition_size = {size}: must be at least 1 rank, whole")
        if size > 1 and self.parameter_home is not None:
            raise ValueError(
                "ZeroConfig.zero_hpz_partition_size keeps second shards in memory; leave parameter_home out "
                "(offload_param)"
            )
        if self.zeropp_loco_param is not None and not self.zero_quantized_gradients:
            raise ValueError("ZeroConfig.zeropp_loco_param is of quantised gradients: set zero_quantized_gradients")

    def _check_delayed(self) -> None:
        if self.optimizer_home is None or self.offload_ratio < 1:
            raise ValueError("ZeroConfig.delayed_update needs an optimizer_home for all of the optimizer's state")
        if isinstance(self.gradient_home, Disk):
            raise ValueError(
                "ZeroConfig.delayed_update: the next backward would write over the gradients that the update under way "
                "still reads from the disk; let them wait in memory: gradient_home = Host(), or leave it out"
            )
        if self.parameter_home is not None:
            raise ValueError(
                "ZeroConfig.delayed_update: the next step reads the parameters while the update under way would write "
                "them; leave parameter_home out, or delayed_update"
            )
