"""Local SGD: each rank trains by itself, and every H steps all take the mean of their weights.

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)      # any; its state stays each rank's own
    local = LocalSGD(model, every=8)                             #+ rank 0's weights for all
    for batch in batches:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        local.step()                                             #+ at every 8th call the mean

Memory: the model's own bytes once more while ranks meet, nothing between. Traffic: 2 n (N-1)/N bytes of weights every
H steps, 1/H of DDP's. With H = 1 and plain SGD it is DDP but for rounding: the mean of theta - lr g_i is theta less lr
times the mean gradient.
Stich 2018, arXiv:1805.09767, algorithm 1. torch: PeriodicModelAverager, which averages after the first step of a
period; here, as in the paper, after the last.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.optim.weights import OfModel, Weights, mean_over, refuse_not_finite


class Meeting(ABC):
    """Ranks that train alone and meet every so many steps. `every` may be changed, on all ranks alike."""

    def __init__(
        self,
        model: Weights | nn.Module | Iterable[nn.Parameter],
        every: int,
        group: Group | None = None,
        message_size: int = 5_000_000,
        share_buffers: bool = True,
        wire: torch.dtype | None = None,
    ) -> None:
        """Rank 0's weights and buffers are taken by all ranks of `group`, by default all. A collective.

        message_size: elements in one collective. share_buffers: at a meeting all take rank 0's. wire: the dtype that
        travels. ValueError if every or message_size is less than 1.
        """
        for name, value in {"every": every, "message_size": message_size}.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{type(self).__name__}: {name} = {value!r}: must be a whole number, 1 or more")
        self.weights = model if isinstance(model, Weights) else OfModel(model)
        self.group, self.every = group or Group.world(), every
        self.message_size, self.share_buffers, self.wire = message_size, share_buffers, wire
        self.since = 0  # steps since the last meeting
        self.meetings = 0
        with torch.no_grad():
            self.weights.start(self.group)

    def step(self) -> bool:
        """After each optimizer step, on all ranks alike: whether they have met.

        To be called also when the step was skipped: ranks count calls.
        """
        self.since += 1
        if self.since < self.every:
            return False
        self.synchronize()
        return True

    @torch.no_grad()
    def synchronize(self) -> None:
        """Meet now, such as after the last step. A collective. FloatingPointError names ranks of no finite weights."""
        self.meet()
        if self.share_buffers:
            self.weights.share_buffers(self.group)
        self.since = 0
        self.meetings += 1

    @abstractmethod
    def meet(self) -> None:
        """All ranks' weights become one."""

    def state_dict(self) -> dict[str, Any]:
        """What goes on from here bit for bit. Between two meetings this rank's weights are in it, and it is its own."""
        return {
            "kind": type(self).__name__,
            "names": list(self.weights.names),
            "since": self.since,
            "meetings": self.meetings,
            "rank": (self.group.rank, self.group.size) if self.since else None,
            "local": [t.clone() for t in self.weights.read()] if self.since else None,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`. ValueError for another kind, other parameters, or another rank's.

        What was saved at a meeting fits any rank and any number of them.
        """
        here = {"kind": type(self).__name__, "names": list(self.weights.names)}
        for key, value in here.items():
            if state.get(key) != value:
                raise ValueError(
                    f"{type(self).__name__}: this state was saved with {key} = {state.get(key)}, here {value}"
                )
        place = (self.group.rank, self.group.size)
        if state["rank"] is not None and tuple(state["rank"]) != place:
            raise ValueError(
                f"{type(self).__name__}: this state was saved {state['since']} steps after a meeting by rank "
                f"{state['rank'][0]} of {state['rank'][1]}; here is rank {place[0]} of {place[1]}: every rank loads "
                "its own, or save after synchronize()"
            )
        self.since, self.meetings = state["since"], state["meetings"]
        if state["local"] is not None:
            own = self.weights.read()
            fill(own, state["local"], self.weights.names)
            self.weights.write(own)


class LocalSGD(Meeting):
    """Means of weights. What was frozen in between is averaged once more, what is unfrozen from then on."""

    def meet(self) -> None:
        """Each rank's weights -> their mean, the same bits on every rank."""
        self.weights.refresh()
        own = self.weights.read()
        means = [tensor.clone() for tensor in own]
        mean_over(self.group, means, self.message_size, self.wire, "weights")
        refuse_not_finite(self.group, means, own, self.weights.names)
        self.weights.write(means)


def fill(tensors: list[Tensor], saved: list[Tensor], names: list[str]) -> None:
    """Copy each saved tensor into ours. ValueError for another shape, which names it."""
    for mine, other, name in zip(tensors, saved, names, strict=True):
        if mine.shape != other.shape:
            raise ValueError(f"{name}: saved with shape {tuple(other.shape)}, here {tuple(mine.shape)}")
        mine.copy_(other)
