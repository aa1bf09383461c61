"""A model as a chain of layers, cut into stages: this module has the layers of the stages that its rank holds.

    layers     Linear ReLU Linear ReLU Linear        any mix of LayerSpec, modules and functions; or an nn.Sequential
    bounds     [0, 2, 5]                             `partition.py`
    rank 0     "0", "1"         rank 1  "2", "3", "4"      parameters keep the layer's number as their name

So the ranks' state dictionaries together are that of the nn.Sequential of all layers.

Tied weights: each rank that uses a weight has a copy, equal at the start; after the last micro-batch the copies'
gradients are summed (`shared.py`), and so equal optimizers keep them equal. They are those of a TiedLayerSpec's key
(`ties.py`), and, in modules that are already built, every parameter that is the same object in several stages. Where
one rank holds both places, as in ZB-V, whose first rank has the first and the last stage, there is nothing to sum.
A loss that is a `WithRouting`: each stage adds the balance of its own mixtures of experts, micro-batch by micro-batch,
whatever the schedule; nothing of it travels.
With `checkpoint_interval` n every n layers are computed again in backward (`refimpl.activation`).
DeepSpeed: deepspeed/runtime/pipe/module.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.activation.checkpoint import Checkpoint
from refimpl.activation.state import aside
from refimpl.comm.axes import Axes
from refimpl.comm.group import Group
from refimpl.model.moe import MoE, WithRouting
from refimpl.parallel.pipeline import partition
from refimpl.parallel.pipeline.layers import Layer, LayerSpec, TiedLayerSpec, type_name
from refimpl.parallel.pipeline.partition import Bounds
from refimpl.parallel.pipeline.runner import Loss, Pipeline
from refimpl.parallel.pipeline.schedules.named import schedule
from refimpl.parallel.pipeline.schedules.table import Table
from refimpl.parallel.pipeline.shared import copy_weights, sum_gradients
from refimpl.parallel.pipeline.ties import beside, shared
from refimpl.parallel.pipeline.wire import writable


class PipelineModule(nn.Module):
    """This rank's layers. Making one is a collective of `group`."""

    def __init__(
        self,
        layers: Iterable[Layer],
        group: Group,
        loss: Loss,
        *,
        axes: Axes | None = None,
        names: Mapping[str, str] | None = None,
        part: Callable[[Any], Any] | None = None,
        schedule: str = "1f1b",
        chunks: int | None = None,
        partition: str | Sequence[float] = "parameters",
        sample: Any = None,
        checkpoint_interval: int = 0,
        how: Callable[..., Any] | None = None,
        checkpointable: Sequence[str] | None = None,
        dynamic: bool = False,
        base_seed: int | None = None,
    ) -> None:
        """layers: the same list on every rank, a stage each rank or `chunks` of them, see `named.schedule`.

        axes: who else there is, for an engine that trains it; not used here. names: what the layers are called in the
        model that they were cut out of, by their names here; see `name_in_whole`. part: of a batch what this rank works
        on, where sequences are cut too; for that engine.
        partition: "uniform", "parameters" (trainable ones), "type:PATTERN" (as many layers of such a class in each
        stage), "time" (seconds of each layer, measured on rank 0 with `sample` as the first one's input), or a weight
        for each layer.
        checkpoint_interval: layers that are computed again together in backward, 0 for none; by `how(function, *x)`, a
        `Checkpoint` by default, if one of them has parameters, or if all are of the classes named in `checkpointable`.
        dynamic: see `Pipeline`. base_seed: layer i is built with the seed base_seed + i on whatever rank; if it is None
        from the random state as it is.
        ValueError for no layers, and for a partition or an interval that there is not.
        """
        super().__init__()
        if checkpoint_interval < 0:
            raise ValueError(f"checkpoint interval {checkpoint_interval}: it must not be negative; 0 is none")
        self.group = group
        self.specs: list[Layer] = list(layers)
        self.name, self.chunks, self.dynamic = schedule, chunks, dynamic
        self.axes, self.names, self.part = axes or Axes.of_pipeline(group), dict(names or {}), part
        self.checkpoint_interval, self.checkpointable = checkpoint_interval, checkpointable
        self.how, self.base_seed = how or Checkpoint(), base_seed
        vars(self)["loss"] = loss  # known everywhere, but what it trains is the last stage's
        table = self._table(1)
        self.bounds = self._cut(partition, table.stages, sample)
        self.tied_modules = nn.ModuleDict()
        self._run: dict[int, Callable[[Any], Any]] = {}  # layer -> what it does
        self.stages, self.last_stage = table.holds(group.rank), table.stages - 1
        for stage in self.stages:
            for i in range(*self.bounds[stage : stage + 2]):
                self._run[i] = self._build(i)
        if self.last_stage in self.stages:
            self.loss = loss
        owners = [s for s in range(table.stages) for _ in range(*self.bounds[s : s + 2])]
        losses, owners = ([loss], [*owners, self.last_stage]) if isinstance(loss, nn.Module) else ([], owners)
        holders = [{path[s] for path in table.paths} for s in owners]
        told = group.all_gather_object(beside(self.specs, self.tied_modules))
        self.shared = shared([*self.specs, *losses], holders, group.rank, self._module, told)
        for ranks, params in self.shared:
            copy_weights(group, ranks, params)
        # Copies that an earlier rank counts where the whole model's parameters or gradients are counted.
        self.repeated = [p for ranks, params in self.shared for p in params if ranks[0] != group.rank]
        self.first_names = self._first_names()  # of these, on the rank that counts them
        # Modules that lie on other ranks were needed until here, and take memory: from now on their class stands there.
        here = self._run
        self.specs = [type(x) if isinstance(x, nn.Module) and i not in here else x for i, x in enumerate(self.specs)]
        self.pipelines: dict[int, Pipeline] = {}

    def train(self, mode: bool = True) -> "PipelineModule":
        """Also a loss that trains on another rank: a `WithRouting` goes by it."""
        if isinstance(self.loss, nn.Module):
            self.loss.train(mode)
        return super().train(mode)

    def forward_backward(self, inputs: Sequence[Any], targets: Sequence[Any], scale: float | None = None) -> Tensor:
        """One step's micro-batches: gradients are added to `.grad`, those of shared weights summed over their ranks.

        Returns [m]: every micro-batch's loss, on every rank. See `Pipeline.run` for the arguments.
        """
        pipeline = self.pipeline(len(inputs))
        before = {p: p.grad for _, params in self.shared for p in params}  # summed already, if it is there
        for p in before:
            p.grad = None
        losses = pipeline.everywhere(pipeline.run(inputs, targets, scale))
        for ranks, params in self.shared:
            sum_gradients(self.group, ranks, params)
        for p, grad in before.items():
            p.grad = grad if p.grad is None else p.grad if grad is None else grad + p.grad
        return losses

    def evaluate(
        self, inputs: Sequence[Any], targets: Sequence[Any], hear: Callable[[Any], object] | None = None
    ) -> Tensor:
        """[m]: every micro-batch's loss, on every rank. Forward alone. hear: gets what the last stage gives, there."""
        pipeline = self.pipeline(len(inputs))
        return pipeline.everywhere(pipeline.evaluate(inputs, targets, hear))

    def pipeline(self, micro_batches: int) -> Pipeline:
        """The runner for so many micro-batches."""
        if micro_batches not in self.pipelines:
            table = self._table(micro_batches)
            stages = {s: partial(self.stage, s) for s in table.holds(self.group.rank)}
            loss = self.loss.loss if isinstance(self.loss, WithRouting) else self.loss
            self.pipelines[micro_batches] = Pipeline(
                table, stages, self.group, loss, added=self.routing_loss, dynamic=self.dynamic
            )
        return self.pipelines[micro_batches]

    def routing_loss(self, stage: int) -> Tensor | None:
        """What the mixtures of a stage that is here add to the loss, by their last calls; None if nothing."""
        if not isinstance(self.loss, WithRouting):
            return None
        called = [self._module(i) for i in range(*self.bounds[stage : stage + 2])]
        parts = [part for module in called if isinstance(module, nn.Module) for part in module.modules()]
        return self.loss.added([part for part in parts if isinstance(part, MoE)])

    def stage(self, stage: int, x: Any) -> Any:
        """x through the layers of one stage that is here."""
        first, last = self.bounds[stage : stage + 2]
        x, every = writable(x), self.checkpoint_interval or max(1, last - first)
        for begin in range(first, last, every):
            layers = [self._run[i] for i in range(begin, min(begin + every, last))]
            if self.checkpoint_interval and self._is_checkpointable(begin, begin + len(layers)):
                call, args = spread(layers, x)
                x = self.how(call, *args)
            else:
                x = chain(layers, x)
        return x

    def forward(self, x: Any) -> Any:
        """x through the whole model, where all of it is here. RuntimeError on one of several ranks."""
        if len(self._run) < len(self.specs):
            raise RuntimeError(
                f"rank {self.group.rank} has layers {sorted(self._run)} of {len(self.specs)}: call forward_backward or "
                "evaluate on all ranks"
            )
        return chain(self.forward_funcs, x)

    @property
    def forward_funcs(self) -> list[Callable[[Any], Any]]:
        """What the layers here call, one after the other: modules, functions."""
        return [self._run[i] for i in sorted(self._run)]

    def name_in_whole(self, name: str) -> str:
        """What a parameter or module of this module is called in the model that it was cut out of."""
        known = max((key for key in self.names if f"{name}.".startswith(f"{key}.")), key=len, default=None)
        return name if known is None else self.names[known] + name.removeprefix(known)

    def first_of(self, p: nn.Parameter) -> str:
        """What a parameter of `repeated` is called in the whole model."""
        return self.name_in_whole(self.first_names[p])

    def _first_names(self) -> dict[nn.Parameter, str]:
        names = {p: name for name, p in self.named_parameters()}
        mine = [(tuple(ranks), [names[p] for p in params]) for ranks, params in self.shared]
        theirs = dict.fromkeys(self.repeated, "")
        for rank, said in enumerate(self.group.all_gather_object(mine)):
            for (ranks, known), (own, params) in product(said, self.shared):
                if ranks == tuple(own) and ranks[0] == rank:
                    theirs |= {p: name for p, name in zip(params, known, strict=True) if p in theirs}
        return theirs

    def _table(self, micro_batches: int) -> Table:
        return schedule(self.name, self.group.size, micro_batches, self.chunks)

    def _cut(self, method: str | Sequence[float], stages: int, sample: Any) -> Bounds:
        names = [type_name(layer) for layer in self.specs]
        if not names:
            raise ValueError("a pipeline of no layers")
        if method == "uniform":
            return partition.uniform(len(names), stages)
        if method == "parameters":
            with aside(self.group.device):
                weights = self._count_layer_params()
        elif method == "time":
            weights = self._measured(sample)
        elif isinstance(method, str) and method.lower().startswith("type:"):
            weights = partition.matching(names, method[5:])
        elif not isinstance(method, str) and len(method) == len(names):
            weights = list(method)
        else:
            raise ValueError(
                f"partition {method!r}: it must be uniform, parameters, time, type:PATTERN, or {len(names)} weights"
            )
        return partition.balanced(weights, stages)

    def _count_layer_params(self) -> Sequence[float]:
        """Each layer's weight for "parameters": those that are trained. DeepSpeed's name, for who counts others."""
        return [partition.parameters(x.shape() if isinstance(x, LayerSpec) else x) for x in self.specs]

    def _measured(self, sample: Any) -> list[float]:
        """Rank 0 builds and times every layer, one after the other, and tells the others."""
        if sample is None:
            raise ValueError("partition 'time' needs `sample`, an input of the first layer")
        found = torch.zeros(len(self.specs), dtype=torch.float64, device=self.group.device)
        if self.group.rank == 0:
            with aside(self.group.device):
                layers = (
                    self._callable(i, x.build() if isinstance(x, LayerSpec) else x) for i, x in enumerate(self.specs)
                )
                found.copy_(torch.tensor(partition.seconds(layers, sample)))
        self.group.broadcast(found)
        weights: list[float] = found.tolist()
        return weights

    def _build(self, i: int) -> Callable[[Any], Any]:
        layer = self.specs[i]
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = self._made(i, layer)
            return self._callable(i, self.tied_modules[layer.key])
        module = self._made(i, layer) if isinstance(layer, LayerSpec) else layer
        if isinstance(module, nn.Module):
            self.add_module(str(i), module)
        return module

    def _made(self, i: int, layer: LayerSpec) -> nn.Module:
        if self.base_seed is None:
            return layer.build()
        with aside(self.group.device, self.base_seed + i):
            return layer.build()

    def _callable(self, i: int, module: Any) -> Callable[[Any], Any]:
        layer = self.specs[i]
        tied = layer.forward_fn if isinstance(layer, TiedLayerSpec) else None
        return partial(tied, module) if tied else module

    def _is_checkpointable(self, first: int, end: int) -> bool:
        modules = [self._module(i) for i in range(first, end)]
        if self.checkpointable is not None:
            return all(type_name(module) in self.checkpointable for module in modules)
        return any(isinstance(module, nn.Module) and any(True for _ in module.parameters()) for module in modules)

    def _module(self, i: int) -> Any:
        """What layer i, which is here, calls: a module, or a function."""
        run = self._run[i]
        return run.args[0] if isinstance(self.specs[i], TiedLayerSpec) and isinstance(run, partial) else run


def chain(layers: Sequence[Callable[[Any], Any]], x: Any) -> Any:
    """x through all of them."""
    for layer in layers:
        x = layer(x)
    return x


def spread(layers: Sequence[Callable[[Any], Any]], x: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function and its arguments, for `chain(layers, x)`: a tuple's elements are arguments of their own, as in
    DeepSpeed. torch's reentrant checkpoint returns no gradient to a tensor inside a tuple, and says nothing.
    """
    if type(x) is tuple:
        return lambda *xs: chain(layers, xs), x
    return partial(chain, layers), (x,)
