"""The ways in which a unit's shards become the unit: mine [S] of every rank -> full [P].

    way          bytes a rank sends, Psi b those of the model          of these between nodes, P ranks each, n nodes
    Flat         Psi b (N-1)/N                                         Psi b (n-1)/n         a rank
    TwoLevel     the same                                              Psi b (n-1)/n         a node: P times fewer
    Quantised    Psi (1 + 4/256) in the place of Psi b                 as the way that carries it

`Quantised` is qwZ of ZeRO++: int8 in blocks of 256 with an fp32 scale each, for bf16 half the bytes. Every rank
computes with the same rounded weights, its own shard's included; what it owns, and updates, stays exact.
`TwoLevel` gathers between the nodes first, where each shard travels once, then inside the node: DeepSpeed's
`mics_hierarchical_params_gather` (until 0.19.6, deepspeed/runtime/zero/mics.py). It is `comm/hierarchy.py`'s
all-gather, in steps that run beside what computes.
Wang et al. 2023, arXiv:2306.10209, section 3.1; Zhang et al. 2022, arXiv:2205.00119, section 3.3. DeepSpeed:
deepspeed/runtime/zero/partition_parameters.py, `CUDAQuantizer`.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from refimpl.comm.collectives import Scratch
from refimpl.comm.group import Group
from refimpl.comm.work import Steps, Work
from refimpl.compress.compressor import Compressor, pack, unpack


class Way(ABC):
    """Of one group of ranks; `scratch` lends what travels, and is nobody's between two gathers."""

    is_exact = True  # whether the unit is then what the ranks own

    @abstractmethod
    def gather(self, full: Tensor, mine: Tensor) -> Work:
        """Begin: mine [S] on every rank -> full [N * S], in rank order."""

    def ahead(self) -> AbstractContextManager[None]:
        """For kernels that make `mine`, before `gather`: where that goes, if it sends `mine` as it is."""
        return nullcontext()

    def stale(self) -> None:  # noqa: B027
        """What the ranks own has changed."""

    def tensors(self) -> list[Tensor]:
        """What this way keeps of the unit."""
        return []


class Flat(Way):
    """One all-gather over all ranks."""

    def __init__(self, group: Group, tag: str = "parameters") -> None:
        self.group, self.tag = group, tag

    def gather(self, full: Tensor, mine: Tensor) -> Work:
        return self.group.all_gather(full, mine, async_op=True, tag=self.tag)

    def ahead(self) -> AbstractContextManager[None]:
        lane = self.group.route.direct.lane
        return nullcontext() if lane is None else lane.following()


class TwoLevel(Way):
    """Between the nodes, then inside: `near` are this node's ranks, `far` those with this one's place in every node."""

    def __init__(self, near: Group, far: Group, scratch: Scratch) -> None:
        self.near, self.far, self.scratch = near, far, scratch

    def gather(self, full: Tensor, mine: Tensor) -> Work:
        return Work(self._steps(full, mine))

    def _steps(self, full: Tensor, mine: Tensor) -> Steps:
        """Node j's place i has shard (j, i)."""
        nodes, places, size = self.far.size, self.near.size, mine.numel()
        column = self.scratch.take(nodes * size, mine)  # shards (j, my place) of all nodes j
        yield lambda: [self.far.all_gather(column, mine, async_op=True, tag="parameters far")]
        rows = full.view(nodes, places, size)
        shards = column.view(nodes, size)
        # One gather a node: each fills a run of `full` in place.
        yield lambda: [
            self.near.all_gather(row.view(-1), shard, async_op=True, tag="parameters near")
            for row, shard in zip(rows.unbind(), shards.unbind(), strict=True)
        ]
        self.scratch.give(column)


class Quantised(Way):
    """What travels is the wire of the shard; `carrier` takes it to every rank."""

    is_exact = False

    def __init__(self, compressor: Compressor, carrier: Way, scratch: Scratch) -> None:
        self.compressor, self.carrier, self.scratch = compressor, carrier, scratch

    def gather(self, full: Tensor, mine: Tensor) -> Work:
        return Work(self._steps(full, self.compressor.compress(mine), mine.numel()))

    def carry(self, full: Tensor, wire: tuple[Tensor, ...], size: int) -> Work:
        """The same of a shard [size] that is there as its wire already."""
        return Work(self._steps(full, wire, size))

    def _steps(self, full: Tensor, wire: tuple[Tensor, ...], size: int) -> Steps:
        message, ranks = pack(wire, full.device), full.numel() // size
        received = self.scratch.take(ranks * message.numel(), message)
        yield lambda: [self.carrier.gather(received, message)]
        layout = self.compressor.layout(size, full.dtype)
        for out, its in zip(full.view(ranks, size).unbind(), received.view(ranks, -1).unbind(), strict=True):
            out.copy_(self.compressor.decompress(unpack(its, layout), size))
        self.scratch.give(received)
