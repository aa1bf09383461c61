"""What a rank trains by itself between two meetings: the parameters of a model, or what a ZeRO stage keeps of them.

`Weights` is all that `LocalSGD` and `DiLoCo` know of a model. A stage's are made by `refimpl.zero.rarely.shards_of`:
the ranks near by are averaged at every step, and only those far off, with the same shard, meet rarely.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from refimpl.comm.first import take_first
from refimpl.comm.group import Group


class Weights(ABC):
    """`names`: one for each tensor of `read`."""

    names: list[str]

    @abstractmethod
    def read(self) -> list[Tensor]:
        """The weights, as exact as this rank has them: to be changed in place, and then given to `write`."""

    @abstractmethod
    def write(self, values: list[Tensor]) -> None:
        """Let `values`, in the order and the shapes of `read`, be the weights."""

    @abstractmethod
    def frozen(self, values: list[Tensor]) -> list[Tensor]:
        """Views of those parts of `values` that are not trained now."""

    @abstractmethod
    def start(self, group: Group) -> None:
        """The first rank's parameters and buffers, frozen ones too, for all ranks of `group`. A collective."""

    @abstractmethod
    def refresh(self) -> None:
        """Take in what is trained since the last call, and was not before."""

    def share_buffers(self, group: Group) -> None:
        """The first rank's buffers for all. A collective."""
        take_first(self.buffers(), group, "buffers")

    def buffers(self) -> list[Tensor]:
        """The model's."""
        return []


class OfModel(Weights):
    """The trainable floating-point parameters of a module, or of an iterable of parameters; tied ones once."""

    def __init__(self, model: nn.Module | Iterable[nn.Parameter]) -> None:
        """ValueError if there is nothing to train."""
        self.model = model if isinstance(model, nn.Module) else nn.ParameterList(model)
        self.of: dict[nn.Parameter, str] = {}  # what was trainable at any time, in order of registration
        self.refresh()
        if not self.of:
            raise ValueError("no parameter to train: each has requires_grad = False, or there is none")

    def refresh(self) -> None:
        named = self.model.named_parameters()  # tied ones come once
        self.of |= {p: name for name, p in named if p.requires_grad and p.is_floating_point() and p not in self.of}
        self.names = list(self.of.values())

    def read(self) -> list[Tensor]:
        return [p.detach() for p in self.of]

    def write(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(self.of, values, strict=True):
                p.copy_(value)

    def frozen(self, values: list[Tensor]) -> list[Tensor]:
        return [value for p, value in zip(self.of, values, strict=True) if not p.requires_grad]

    def start(self, group: Group) -> None:
        take_first(dict.fromkeys([*self.model.parameters(), *self.buffers()]), group, "start")

    def buffers(self) -> list[Tensor]:
        return list(self.model.buffers())


def mean_over(group: Group, tensors: Sequence[Tensor], most: int, wire: torch.dtype | None, tag: str) -> None:
    """Replace each tensor by its mean over the ranks of `group`, the same bits on all, about `most` elements a message.

    `wire`: the dtype that travels; None: the tensors' own. Sends 2 n (N-1)/N bytes of n.
    """
    for chunk in chunks(tensors, most):
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])  # [n]
        there = flat.to(wire or flat.dtype)
        group.all_reduce(there, "mean", tag=tag)
        for tensor, mean in zip(chunk, there.split([tensor.numel() for tensor in chunk]), strict=True):  # type: ignore[no-untyped-call]
            tensor.copy_(mean.view(tensor.shape))


def chunks(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, at most `most` elements together, or one larger tensor."""
    chunk: list[Tensor] = []
    for tensor in tensors:
        full = sum(t.numel() for t in chunk) + tensor.numel() > most
        if chunk and (full or tensor.dtype != chunk[0].dtype):
            yield chunk
            chunk = []
        chunk.append(tensor)
    if chunk:
        yield chunk


def refuse_not_finite(group: Group, means: Sequence[Tensor], mine: Sequence[Tensor], names: Sequence[str]) -> None:
    """FloatingPointError on all ranks, which names those whose `mine` made a mean infinite or NaN."""
    if not means or bool(torch.stack([mean.isfinite().all() for mean in means]).all()):  # the host waits once
        return
    bad = [name for name, own in zip(names, mine, strict=True) if not bool(own.isfinite().all())]
    said = group.all_gather_object(bad)
    whose = "; ".join(f"rank {group.ranks[r]}: {', '.join(b[:3])}" for r, b in enumerate(said) if b)
    raise FloatingPointError(
        f"weights that are not finite, at the meeting of ranks {group.ranks}: {whose or 'only their sum is not'}; "
        "nothing was averaged: go on from the last checkpoint"
    )
