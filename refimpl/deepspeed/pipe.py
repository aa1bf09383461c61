"""DeepSpeed's pipeline classes by name. DeepSpeed: deepspeed/pipe, deepspeed/runtime/pipe/module.py."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from refimpl.activation.checkpoint import Checkpoint
from refimpl.comm.axes import Axes
from refimpl.comm.mesh import Mesh
from refimpl.deepspeed.grid import PipelineParallelGrid
from refimpl.engine.assemble import connect
from refimpl.engine.pipeline import PipelineEngine, PipelineError
from refimpl.parallel.pipeline import module
from refimpl.parallel.pipeline.layers import Layer, LayerSpec, TiedLayerSpec
from refimpl.parallel.pipeline.partition import Bounds
from refimpl.parallel.pipeline.schedules.table import Table, whole
from refimpl.parallel.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = [
    "DualPipeVModule", "LayerSpec", "PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineEngine",
    "PipelineError", "PipelineModule", "ProcessTopology", "TiedLayerSpec",
]  # fmt: skip


AXES = {"pipe": "pp", "data": "dp", "model": "tp"}  # DeepSpeed's names, outermost first -> ours


class PipelineModule(module.PipelineModule):
    """DeepSpeed's arguments and questions; the ranks are laid out by `topology`, 1F1B is the schedule."""

    SCHEDULE: ClassVar = "1f1b"

    def __init__(
        self,
        layers: Iterable[Layer],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        """loss_fn None: the last layer returns the loss. seed_layers: layer i is built with the seed base_seed + i.

        activation_checkpoint_func: called as f(function, x). ValueError without num_stages and topology, or if the
        ranks are no multiple of num_stages; NotImplementedError for other axes than these, and for seed_fn. Along a
        "model" axis the layers must be split by who wrote them, or be those of refimpl.parallel.
        """
        if num_stages is None and topology is None:
            raise ValueError("PipelineModule needs num_stages or topology")
        if seed_fn is not None:
            raise NotImplementedError("PipelineModule: seed_fn: not part of this project; base_seed seeds torch")
        ranks = connect().size
        if topology is None:
            assert num_stages is not None
            if num_stages < 1 or ranks % num_stages:
                raise ValueError(f"num_stages {num_stages} does not divide the job's {ranks} ranks")
            topology = PipeDataParallelTopology(num_pp=num_stages, num_dp=ranks // num_stages)
        sizes = dict(zip(topology.axes, topology.dims, strict=True))
        if other := [axis for axis, size in sizes.items() if axis not in AXES and size > 1]:
            raise NotImplementedError(
                f"PipelineModule: the axis {other[0]!r} of the topology: ranks are laid out on {', '.join(AXES)}"
            )
        if [axis for axis in sizes if axis in AXES] != [axis for axis in AXES if axis in sizes]:
            raise NotImplementedError(f"PipelineModule: axes in the order {list(sizes)}: use {', '.join(AXES)}")
        axes = Axes.of_mesh(Mesh({name: sizes.get(axis, 1) for axis, name in AXES.items()}))
        self._topo, self.global_rank = topology, axes.world.rank  # a `_partition_layers` reads them
        super().__init__(
            layers,
            axes.pipeline,
            loss_fn or last_is_loss,
            axes=axes,
            schedule=self.SCHEDULE,
            partition=partition_method,
            checkpoint_interval=activation_checkpoint_interval,
            how=activation_checkpoint_func or Checkpoint(),
            checkpointable=checkpointable_layers,
            dynamic=dynamic_shape,
            base_seed=base_seed if seed_layers else None,
        )
        self.grid = PipelineParallelGrid(topology)  # an engine's `grid` too, which asks its module

    @property
    def loss_fn(self) -> Callable[[Any, Any], Tensor]:
        """What makes a loss of the last layer's output and the labels."""
        return self.loss

    @property
    def num_stages(self) -> int:
        """Ranks that a micro-batch passes."""
        return self.group.size

    def _cut(self, method: str | Sequence[float], stages: int, sample: Any) -> Bounds:
        self._partition_layers(method)
        return self.parts

    def _partition_layers(self, method: str | Sequence[float] = "uniform") -> None:
        """Say `parts`: stage s has layers parts[s] to parts[s + 1] - 1. A subclass may cut in its own way."""
        self.parts: Bounds = super()._cut(method, self.num_stages, None)

    def _set_bounds(self, start: int | None = None, stop: int | None = None) -> None:
        """Nothing: a rank's layers are found in `parts`. DeepSpeed's `_partition_layers` ends with this call."""

    @property
    def _layer_specs(self) -> list[Layer]:
        """All layers, as they were given, while they are cut; afterwards of those on other ranks the class."""
        return self.specs

    def topology(self) -> ProcessTopology:
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """Who shares what of the model, as `engine.mpu`."""
        return self.grid

    def num_pipeline_stages(self) -> int:
        return self.group.size

    def partitions(self) -> list[int]:
        return self.bounds

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that a layer lies in. ValueError for one that there is not."""
        for stage, end in enumerate(self.bounds[1:]):
            if 0 <= layer_idx < end:
                return stage
        raise ValueError(f"there is no layer {layer_idx}: the model has {self.bounds[-1]}")

    @property
    def activation_checkpoint_func(self) -> Callable[..., Any]:
        """f(function, *x), by which layers are computed again in backward."""
        return self.how

    @property
    def activation_checkpoint_interval(self) -> int:
        """Layers that are computed again together in backward; 0 for none."""
        return self.checkpoint_interval

    def set_checkpoint_interval(self, interval: int) -> None:
        """Layers that are computed again together in backward, from the next batch on; 0 for none."""
        if interval < 0:
            raise ValueError(f"set_checkpoint_interval({interval}): must not be negative")
        self.checkpoint_interval = interval


class DualPipeVModule(PipelineModule):
    """`num_stages` ranks with two stages each, r and 2 num_stages - 1 - r, under DualPipeV.

    So rank 0 reads the data and has the loss, and what ties the first layer to the last lies there twice at no cost. As
    in DeepSpeed no backward is split: half of it could not begin at a checkpoint of torch's reentrant kind, and would
    compute any other one's layers a second time. `refimpl.parallel`'s PipelineModule(schedule="dualpipe-v") splits.
    """

    SCHEDULE: ClassVar = "dualpipe-v"

    def _table(self, micro_batches: int) -> Table:
        return whole(super()._table(micro_batches))

    @property
    def num_stages(self) -> int:
        """Stages that a micro-batch passes: two of each rank. DeepSpeed's engine and grid count the ranks."""
        return 2 * self.group.size

    def stage_owner(self, layer_idx: int) -> int:
        """The rank of the pipeline that has a layer. ValueError for one that there is not."""
        stage = super().stage_owner(layer_idx)
        return min(stage, self.num_stages - 1 - stage)


def last_is_loss(output: Tensor, _: Any) -> Tensor:
    """Of a model whose last layer computes the loss."""
    return output
