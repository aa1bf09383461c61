"""ZeRO++ and MiCS: which way the units of ZeRO-3 are gathered, and which way its gradients are reduced.

    key                                    what it does                                      see
    zero_quantized_weights                 gathers carry int8                                `Quantised`
    zero_quantized_nontrainable_weights    frozen shards rest as int8, and travel so         `Rounded`
    zero_hpz_partition_size                a second shard among so many neighbours           `Secondary`
    zero_quantized_gradients               two hops of int4 in place of a reduce-scatter     `QuantisedSum`
    zeropp_loco_param                      what those lose comes back                        `MovingErrors`
    mics_hierarchical_params_gather        gathers between nodes first, then inside          `TwoLevel`

Bytes that leave a node in a step with one micro-batch, in units of M (n-1)/n, with n nodes and M the model in bf16:

                forward   backward   gradients
    ZeRO-3      1         1          1            if each shard leaves its node once, as in a ring or in two levels;
    qwZ         0.5       0.5        1            P times that, P ranks a node, where every rank sends to every other
    hpZ         1         0          1
    qgZ         1         1          0.25
    all three   0.5       0          0.25         Wang et al. 2023, arXiv:2306.10209: 3M become 0.75M

Blocks' scales come on top, 4 bytes for 256 numbers, and padding: `refimpl.plan.plus` has the formula to the byte.
Parameters that stay whole on every rank, being small, are gathered and reduced as ever. Whole parameters that somebody
asks for (`state_dict`, `GatheredParameters`, checkpoints) are what the ranks own, unrounded.
A node is what `refimpl.comm.nodes` says.
"""

import warnings
from typing import Any

import torch.distributed as dist
from torch import Tensor

from refimpl.comm.axes import neighbours
from refimpl.comm.collectives import Scratch
from refimpl.comm.group import Group
from refimpl.comm.nodes import on_nodes
from refimpl.compress.blocks import Blocks
from refimpl.zero.config import ZeroConfig
from refimpl.zero.gather.rounded import AtRest, Rounded
from refimpl.zero.gather.secondary import Secondary
from refimpl.zero.gather.unit import Unit
from refimpl.zero.gather.ways import Flat, Quantised, TwoLevel, Way
from refimpl.zero.reduction.loco import MovingErrors
from refimpl.zero.reduction.quantised_sum import QuantisedSum

WEIGHTS, GRADIENTS = Blocks(bits=8), Blocks(bits=4)


class Plus:
    """The ways of one stage's units and reductions."""

    def __init__(self, group: Group, config: ZeroConfig, parted: bool = False, **of_errors: Any) -> None:
        """`parted`: some ranks have other experts. `of_errors`: see `MovingErrors`.

        ValueError, by the key's name, for what the ranks cannot do.
        """
        self.group, self.config = group, config
        self.scratch = Scratch(group.streams, group.empty)
        self.errors: MovingErrors | None = None
        self.sum: QuantisedSum | None = None
        self._neighbours: dict[int, tuple[Group, Group]] = {}
        if parted and (asked := config.asks_for_plus()):
            raise ValueError(f"{asked[0]}: not with experts that only some of the ranks have; leave it out")
        size = config.zero_hpz_partition_size
        if group.size % size:
            raise ValueError(
                f"zero_hpz_partition_size = {size}: must divide the {group.size} ranks that share the parameters"
            )
        here = self.on_nodes() if size > 1 else {}
        if group.rank == 0 and any(count % size for count in here.values()):
            warnings.warn(
                f"zero_hpz_partition_size = {size}: {min(here.values())} of these ranks are on a node, so second "
                "shards lie on several, and backward's gathers go between them",
                stacklevel=2,
            )
        if group.rank == 0 and len(here) == 1 and group.size < dist.get_world_size():  # as MiCS may put them
            warnings.warn(
                f"zero_hpz_partition_size = {size}: the {group.size} ranks that share the parameters are on one node "
                "already, so second shards cost memory and save nothing; leave it out",
                stacklevel=2,
            )
        if config.zero_quantized_gradients:
            near, far = self.nodes()
            if config.zeropp_loco_param is not None:
                self.errors = MovingErrors(group, far.size, GRADIENTS, config.zeropp_loco_param, **of_errors)
            self.sum = QuantisedSum(near, far, GRADIENTS, self.scratch, self.errors)

    def nodes(self) -> tuple[Group, Group]:
        """This node's ranks of the group, and those with this one's place in every node."""
        there = self.on_nodes()
        if len(set(there.values())) > 1:
            raise ValueError(f"ranks {self.group.ranks} are {there} on nodes: ZeRO++ and MiCS need as many on each")
        return self.neighbours(min(there.values()))

    def on_nodes(self) -> dict[int, int]:
        """How many of the group's ranks are on each node."""
        world = dist.get_world_size() if self.group.handle else 1
        return on_nodes(self.group.ranks, world) if world > 1 else {0: 1}

    def neighbours(self, size: int) -> tuple[Group, Group]:
        """Blocks of `size` ranks, and the lines across; whose ranks, if they part, are found as those of the group."""
        if size not in self._neighbours:
            groups = neighbours(self.group, size)
            for group in groups:
                group.patience = self.group.patience  # one count of collectives
            self._neighbours[size] = groups
        return self._neighbours[size]

    def outfit(self, unit: Unit) -> None:
        """Give a unit its way of being gathered, and of being reduced."""
        config, frozen = self.config, unit.group_index < 0
        unit.sum = self.sum
        way: Way = Flat(unit.group)
        if config.mics_hierarchical_params_gather:
            near, far = self.nodes()
            way = TwoLevel(near, far, self.scratch) if near.size > 1 and far.size > 1 else way
        unit.exactly = way
        if unit.dtype.is_floating_point:
            if frozen and config.zero_quantized_nontrainable_weights and unit.shelf is None:
                unit.rest_on(Rounded(unit.mine, WEIGHTS))
            if isinstance(unit.shelf, Rounded):
                way = AtRest(unit.shelf, way, self.scratch)
            elif config.zero_quantized_weights:
                way = Quantised(WEIGHTS, way, self.scratch)
        if config.zero_hpz_partition_size > 1:
            block, _ = self.neighbours(config.zero_hpz_partition_size)
            way = Secondary(block, way, unit.padded, unit.dtype, unit.device)
        unit.way = way

    def thaw(self, unit: Unit) -> None:
        """From now on the unit is trained."""
        if isinstance(unit.shelf, Rounded):
            unit.come_back()
            self.outfit(unit)

    def after_step(self, done: bool) -> None:
        """A step is over, or was skipped."""
        if self.errors is not None:
            self.errors.after_step(done)

    def forget(self) -> None:
        """The weights were replaced: what rounding lost was of gradients at others."""
        if self.errors is not None:
            self.errors.kept.clear()

    def tensors(self, units: list[Unit]) -> dict[str, list[Tensor]]:
        """What all of this keeps, by class, as `Stage.tensors`; nothing without it."""
        kept = {
            "second shards": [t for unit in units for t in unit.way.tensors()],
            "rounding errors": self.errors.tensors() if self.errors else [],
            "messages": self.scratch.tensors(),
        }
        return {name: tensors for name, tensors in kept.items() if tensors}
