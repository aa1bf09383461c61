"""Where each token goes: the experts it is sent to, its place in their buffers, the weights its answers are added with.

A gate's whole decision is k numbers a token, from which both ways of moving tokens are made. GShard's multiplies with
one-hot matrices [T, E, C]: 2 T E C M FLOPs to move k T M elements, and T E C numbers, nearly all of them 0. Sorted, the
rows of one expert lie together (`Rows`): k T M elements are read and written, and nothing is multiplied.

An expert has room for `capacity` tokens, ceil(factor k T / E) but at least `min_capacity`, and drops the others: a
dropped route adds nothing to its token, which goes on by the residual connection alone. Who is dropped:

    position    the last tokens                                    Switch
    choice      second choices before first ones, then the last    GShard
    probs       those that the gate gives the least
    random      drawn: the end of a sequence is not worse off      random token selection, Kim et al. 2021

Without a factor nothing is dropped, and the capacity is what the fullest expert has.
GShard: Lepikhin et al. 2020, arXiv:2006.16668, algorithm 1. Switch: Fedus et al. 2021, arXiv:2101.03961, section 2.2.
Random token selection: arXiv:2109.10465, section 3.1. DeepSpeed: deepspeed/moe/sharded_moe.py.

    T   tokens of this rank     E   experts      M   width
    k   routes of a token       C   capacity     R   routes that are kept, at most k T
"""

import math
from ctypes import c_float
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Drop = Literal["position", "choice", "probs", "random"]


@dataclass(frozen=True)
class Routes:
    """A gate's decision."""

    indices: Tensor  # [T, k] int64: the expert of each route
    weights: Tensor  # [T, k] fp32, with a gradient: what its answer is multiplied with; 0 where dropped
    kept: Tensor  # [T, k] bool
    slots: Tensor  # [T, k] int64: its place in the expert's buffer, 0 where dropped
    counts: Tensor  # [E] int64: routes that each expert was to get, dropped ones too
    limit: int | None = None  # slots of an expert; None: nothing is dropped
    balance: Tensor = field(default_factory=lambda: torch.zeros(()))  # the load-balance loss, fp32
    z: Tensor = field(default_factory=lambda: torch.zeros(()))  # the z-loss, fp32

    @property
    def experts(self) -> int:
        return self.counts.numel()

    @property
    def capacity(self) -> int:
        """C. Without a limit what the fullest expert has, which the host waits for."""
        return int(self.counts.max()) if self.limit is None else self.limit

    @cached_property
    def rows(self) -> "Rows":
        """The kept routes sorted by expert, each expert's in the order of its slots. The host waits for the counts."""
        expert = torch.where(self.kept, self.indices, self.experts)
        sizes = count(expert.flatten(), self.experts + 1)[:-1]
        starts = sizes.cumsum(0) - sizes
        each = sizes.tolist()
        place = torch.where(self.kept, starts[self.indices.clamp(max=self.experts - 1)] + self.slots, sum(each))
        # Dropped routes all write to one row too many.
        route = torch.empty(sum(each) + 1, dtype=torch.int64, device=place.device)
        route.scatter_(0, place.flatten(), torch.arange(place.numel(), device=place.device))
        return Rows(place, route[:-1], each, sizes)

    def padded(self, capacity: int) -> "Rows":
        """The same with a row for every slot of every expert, full or not."""
        slots = self.experts * capacity
        place = torch.where(self.kept, self.indices.clamp(max=self.experts - 1) * capacity + self.slots, slots)
        route = torch.full((slots + 1,), place.numel(), device=place.device)
        route.scatter_(0, place.flatten(), torch.arange(place.numel(), device=place.device))
        return Rows(place, route[:-1], [capacity] * self.experts, torch.full_like(self.counts, capacity), padded=True)

    def combine(self) -> Tensor:
        """-> [T, E, C] fp32: GShard's combine tensor, with a gradient."""
        return self._dense(self.weights)

    def dispatch(self) -> Tensor:
        """-> [T, E, C] bool: the token in each slot of each expert."""
        return self._dense(self.kept.float()) > 0

    def _dense(self, values: Tensor) -> Tensor:
        flat = self.indices.clamp(max=self.experts - 1) * self.capacity + self.slots
        dense = values.new_zeros(len(self.indices), self.experts * self.capacity)
        return dense.scatter_add(1, flat, values * self.kept).view(-1, self.experts, self.capacity)

    @classmethod
    def given(cls, indices: Tensor, weights: Tensor, experts: int) -> "Routes":
        """Of another model's router: indices, weights [T, k]. Nothing is dropped but indices of `experts` and more."""
        kept = indices < experts
        slots, counts = fill(indices, kept, experts)
        return cls(indices, weights.float() * kept, kept, slots, counts)


@dataclass(frozen=True)
class Rows:
    """Routes that are kept, sorted by expert."""

    place: Tensor  # [T, k] int64: the row of each route, R where dropped
    route: Tensor  # [R] int64: the route of each row, t k + j; T k where padded
    sizes: list[int]  # rows of each expert
    counts: Tensor  # [E] int64: the same, where the tokens are
    padded: bool = False

    @property
    def all_kept(self) -> bool:
        """Whether every route has a row, and every row a route."""
        return not self.padded and len(self.route) == self.place.numel()

    @property
    def tokens(self) -> Tensor:
        """[R]: the token of each row; T where padded."""
        return self.route // max(self.place.shape[1], 1)


def capacity_of(tokens: int, experts: int, factor: float, least: int) -> int:
    """max(ceil(tokens / experts x factor), least), in fp32 as DeepSpeed has it: 30 x 0.1 are 3 slots, and not 4."""
    return max(math.ceil(single(single(factor) * single(tokens / experts))), least)


def single(x: float) -> float:
    """x in fp32. No tensor: one on the default device would have to be waited for."""
    return c_float(x).value


def fill(indices: Tensor, kept: Tensor, experts: int, by_choice: bool = False) -> tuple[Tensor, Tensor]:
    """indices, kept [T, k] -> (slots [T, k], 0 where not kept; kept routes of each expert [E]).

    An expert's slots are filled in the order of its tokens; `by_choice`: all first choices, then all second ones.
    """
    expert = torch.where(kept, indices, experts)
    flat = expert.T.flatten() if by_choice else expert.flatten()
    slots = place_among(flat, experts)
    slots = slots.view(indices.shape[::-1]).T if by_choice else slots.view_as(indices)
    return slots.where(kept, 0), count(flat, experts + 1)[:-1]


def count(numbers: Tensor, below: int) -> Tensor:
    """numbers [R], each of 0 to below - 1 -> [below]: how often each is there.

    torch's bincount would ask the device for the largest, and the host would wait.
    """
    return numbers.new_zeros(below).scatter_add_(0, numbers, torch.ones_like(numbers))


def place_among(expert: Tensor, experts: int, priority: Tensor | None = None) -> Tensor:
    """expert [R], `experts` for none -> [R]: how many come before it at the same expert.

    First those of a higher `priority` [R], of equal ones those that stand first.
    """
    order = None if priority is None else priority.argsort(descending=True, stable=True)
    by = (expert if order is None else expert[order]).argsort(stable=True)
    by = by if order is None else order[by]
    counts = count(expert, experts + 1)
    starts = counts.cumsum(0) - counts
    place = torch.empty_like(expert)
    place[by] = torch.arange(len(expert), device=expert.device) - starts[expert[by]]
    return place


def fit(
    indices: Tensor, probs: Tensor, experts: int, limit: int | None, drop: Drop, used: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """indices, probs [T, k] -> (kept [T, k], slots [T, k], counts [E] of all that were to come).

    used: [T], 0 for tokens that go nowhere, such as padding.
    """
    asked = torch.ones_like(indices, dtype=torch.bool)
    if used is not None:
        asked &= used.bool()[:, None]
    by_choice = drop == "choice"
    slots, counts = fill(indices, asked, experts, by_choice)
    if limit is None:
        return asked, slots, counts
    if drop in ("position", "choice"):
        kept = asked & (slots < limit)
        return kept, slots.where(kept, 0), counts
    priority = probs.detach()
    if drop == "random":
        priority = torch.rand_like(probs.new_empty(len(indices), experts)).gather(1, indices)
    waiting = torch.where(asked, indices, experts).flatten()
    kept = asked & (place_among(waiting, experts, priority.flatten()).view_as(indices) < limit)
    return kept, fill(indices, kept, experts)[0], counts


def balance_loss(probs: Tensor, counts: Tensor, k: int = 1) -> Tensor:
    """E sum over experts of (share of the routes) x (mean probability): 1 where both are even, E at a collapse.

    probs [T, E]; counts [E] of the k T routes. The share has no gradient: the probabilities of the full ones fall. 0
    without tokens. Switch: section 2.2, formula 4.
    """
    tokens = max(len(probs), 1)
    share = counts / (tokens * k)
    return (probs.sum(0) / tokens * share).sum() * len(counts)


def z_loss(logits: Tensor) -> Tensor:
    """Mean over tokens of log(sum(exp(logits)))^2: keeps them small, where rounding is. logits [T, E] -> a scalar.

    Zoph et al. 2022 (ST-MoE), arXiv:2202.08906, formula 5.
    """
    return logits.logsumexp(1).square().sum() / max(len(logits), 1)
