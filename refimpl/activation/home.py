"""Where a checkpoint's inputs wait for backward: on the device, in host memory, or 1/N on each of N neighbours.

    home             bytes kept on the device, of n          traffic a rank, of n
    (none)           n                                       0
    Host()           0                                       n to the host, n back
    Partitioned(g)   ceil(n / N)                             all-gather n (N-1)/N in backward

With L checkpoints of B T w elements: none 2 L B T w bytes in 16 bits, `Partitioned` over N tensor-parallel neighbours
1/N of it. Only neighbours that hold the same activation can share it: tensor-parallel ones do, data-parallel ones have
other samples. `Partitioned` compares the first tensor it is handed over the group, and refuses when they differ.
Rajbhandari et al. 2020, arXiv:1910.02054, section 6.1 (Pa, and Pa+cpu). DeepSpeed: `partition_activations` and
`cpu_checkpointing` in deepspeed/runtime/activation_checkpointing/checkpointing.py, which needs n to divide by N.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from refimpl.comm.group import Group

TAG = "activations"  # of the gathers, in the ledger


class Home(Protocol):
    """A place for floating-point tensors."""

    def put(self, x: Tensor, place: int = 0) -> Any | None:
        """Whatever brings x back, without holding x; None if x is to stay where it is. `place`: its number."""

    def get(self, packed: Any) -> Tensor:
        """x again: same shape, dtype, device and bits."""


@dataclass(frozen=True)
class Sent:
    """A tensor in host memory, and the device it came from."""

    copy: Tensor
    device: torch.device


class Host:
    """Host memory, pinned so that the host need not wait for the copies. What is on the CPU is at home already.

    They are queued on the current stream, behind what makes x and before what may reuse its memory: in order, and not
    beside the computation. (DeepSpeed 0.19 copies on a stream of its own.)
    """

    def put(self, x: Tensor, place: int = 0) -> Sent | None:
        if x.device.type == "cpu":
            return None
        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
        return Sent(copy.copy_(x, non_blocking=True), x.device)

    def get(self, packed: Sent) -> Tensor:
        return packed.copy.to(packed.device, non_blocking=True)


@dataclass(frozen=True)
class Share:
    """This rank's part of a tensor, and what the whole looks like."""

    mine: Any  # [s], or what `then` made of it
    is_away: bool  # whether `then` did
    shape: torch.Size


@dataclass
class Partitioned:
    """Each rank of `group` keeps 1/N, padded up, and gathers the whole in backward: on all ranks, in the same order.

    `then`: a home for the parts. RuntimeError if the ranks' first tensors are not equal.
    """

    group: Group
    then: Home | None = None
    compared: bool = field(default=False, init=False)

    def put(self, x: Tensor, place: int = 0) -> Any | None:
        if self.group.size == 1:
            return None if self.then is None else self.then.put(x, place)
        self._compare(x)
        size = -(-x.numel() // self.group.size)  # [s]
        first = size * self.group.rank
        mine = x.new_zeros(size)
        part = x.reshape(-1)[first : first + size]
        mine[: part.numel()] = part
        packed = self.then.put(mine, place) if self.then is not None else None
        return Share(mine if packed is None else packed, packed is not None, x.shape)

    def get(self, packed: Any) -> Tensor:
        if self.then is not None and not isinstance(packed, Share):
            return self.then.get(packed)
        mine: Tensor = packed.mine
        if packed.is_away:
            assert self.then is not None
            mine = self.then.get(mine)
        whole = mine.new_empty(mine.numel() * self.group.size)  # [N * s]
        self.group.all_gather(whole, mine, tag=TAG)
        return whole[: packed.shape.numel()].view(packed.shape)

    def _compare(self, x: Tensor) -> None:
        """Once: ranks that hold different activations would get a mixture of them back, with no sign of it."""
        if self.compared:
            return
        self.compared = True
        mark = torch.stack([x.double().sum(), x.double().square().sum()]).to(self.group.device)  # [2]
        marks = mark.new_empty(2 * self.group.size)
        self.group.all_gather(marks, mark, tag=TAG)
        if not torch.equal(marks.nan_to_num(), mark.repeat(self.group.size).nan_to_num()):
            raise RuntimeError(
                f"rank {self.group.rank}: partitioned activations, but the {self.group.size} ranks of this group hold "
                "different ones; only tensor-parallel neighbours, which compute the same, can share them"
            )


def kept_bytes(x: Tensor, ranks: int) -> int:
    """Bytes that each of `ranks` neighbours keeps of x."""
    return -(-x.numel() // ranks) * x.element_size()


def gathered_bytes(x: Tensor, ranks: int) -> int:
    """Bytes that each of them sends to bring x back."""
    return kept_bytes(x, ranks) * (ranks - 1)
