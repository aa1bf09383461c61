"""A mixture of experts, forward and backward: our dispatch beside a dense one and a loop over experts.

    refimpl          rows sorted by expert, each expert multiplies its own; on ranks an all-to-all each way
    GShard einsum    one-hot matrices [T, E, C] move tokens into slots, batched products over all experts' slots; on
                     ranks torch's all-to-all of all slots. C is what the fullest expert has, so nothing is dropped
    loop             for each expert the tokens that chose it, as transformers' eager forward has it; on ranks as its
                     expert parallelism: tokens gathered, each rank loops over its experts, sums scattered back

All have the same weights and the same routes, nothing is dropped, and gradients that agree, or the race is refused.
GShard: Lepikhin et al. 2020, arXiv:2006.16668. transformers: integrations/moe.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from refimpl.bench.race import Times, Turns, both_worlds, by_pages, medians, race
from refimpl.comm.axes import Axes
from refimpl.comm.group import Group
from refimpl.model.experts import StackedExperts
from refimpl.model.gates import Gate, Routing
from refimpl.model.moe import Mix, mix
from refimpl.model.routes import Routes
from refimpl.parallel.conjugates import conjugate, gather_sum, sum_scatter
from refimpl.parallel.expert.dispatch import Dispatch
from refimpl.parallel.expert.exchange import Flat

OURS, DENSE, LOOP = "refimpl", "GShard einsum", "loop"
HEAT = ("ranks", "tokens", "width", "hidden", "experts", "k")


@dataclass(frozen=True)
class Size:
    """Of a rank's tokens, and of the whole layer."""

    tokens: int
    width: int
    hidden: int
    experts: int
    k: int


@dataclass(frozen=True)
class Row:
    """`ms`: median step of the slowest rank. Ratios: ours to the better of the others, on the same pages or on any."""

    implementation: str
    ranks: int
    tokens: int
    width: int
    hidden: int
    experts: int
    k: int
    pages: str
    ms: float
    ratio_same_pages: float
    ratio_any_pages: float


def dense(group: Group, experts: StackedExperts, x: Tensor, routes: Routes) -> Tensor:
    """GShard's: x [T, M] -> [T, M]. Every slot of every expert is computed."""
    capacity = torch.tensor(routes.capacity, device=x.device)
    if group.size > 1:
        dist.all_reduce(capacity, dist.ReduceOp.MAX)
    routes = replace(routes, limit=int(capacity))
    slots = torch.einsum("tec,tm->ecm", routes.dispatch().to(x.dtype), x)  # [E, C, M]
    if group.size > 1:
        slots = conjugate(slots, group, all_to_all, all_to_all)
        slots = slots.view(group.size, -1, *slots.shape[1:]).transpose(0, 1).flatten(1, 2)  # [E / N, N C, M]
    gate, up = torch.bmm(slots, experts.up.transpose(1, 2)).chunk(2, -1)
    answers = torch.bmm(F.silu(gate) * up, experts.down.transpose(1, 2))
    if group.size > 1:
        answers = answers.view(len(answers), group.size, -1, x.shape[1]).transpose(0, 1).flatten(0, 1)
        answers = conjugate(answers, group, all_to_all, all_to_all)
    return torch.einsum("tec,ecm->tm", routes.combine(), answers)


def all_to_all(x: Tensor) -> Tensor:
    """torch's, of equal parts."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous())
    return out


def loop(group: Group, experts: StackedExperts, x: Tensor, routes: Routes) -> Tensor:
    """transformers': x [T, M] -> [T, M]."""
    indices, weights = routes.indices, routes.weights
    if group.size > 1:
        x, weights = gather_sum(x, group, 0), gather_sum(weights, group, 0)
        everyone = indices.new_empty(len(x), indices.shape[1])
        group.all_gather(everyone, indices.contiguous())
        indices = everyone
    first = group.rank * len(experts)
    out = torch.zeros_like(x)
    taken = F.one_hot(indices, routes.experts).permute(2, 1, 0)  # [E, k, T]
    for e in taken.sum((1, 2)).nonzero().flatten().tolist():
        if not first <= e < first + len(experts):
            continue
        place, token = torch.where(taken[e])
        gate, up = F.linear(x[token], experts.up[e - first]).chunk(2, -1)
        rows = F.linear(F.silu(gate) * up, experts.down[e - first])
        out.index_add_(0, token, rows * weights[token, place, None])
    return sum_scatter(out, group, 0) if group.size > 1 else out


class Layer(nn.Module):
    """One contestant's own copy of the layer, and its tokens."""

    def __init__(self, size: Size, group: Group, way: Mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = Gate(size.width, size.experts, Routing(k=size.k))
        experts = StackedExperts(size.width, size.hidden, size.experts, std=size.width**-0.5)
        each = size.experts // group.size
        self.experts = experts.part(group.rank * each, (group.rank + 1) * each)
        self.way = way
        torch.manual_seed(1 + group.rank)
        self.x = nn.Parameter(torch.randn(size.tokens, size.width))
        self.to(group.device)

    def forward(self) -> Tensor:
        """Forward and backward -> the sum of the squared outputs."""
        for p in self.parameters():
            p.grad = None
        loss = self.way(self.experts, self.x, self.gate(self.x)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def contestants(size: Size, group: Group) -> dict[str, Layer]:
    """Each way to do it, whose gradients agree. RuntimeError where they do not."""
    axes = Axes.of_data(group).with_experts(group.size)
    ours: Mix = Dispatch(axes.expert, Flat(axes.expert), axes.tensor) if group.size > 1 else mix
    ways: dict[str, Any] = {OURS: ours, DENSE: partial(dense, group), LOOP: partial(loop, group)}
    layers = {name: Layer(size, group, way) for name, way in ways.items()}
    for layer in layers.values():
        layer()
    for name, layer in layers.items():
        for (what, mine), p in zip(layer.named_parameters(), layers[OURS].parameters(), strict=True):
            assert mine.grad is not None
            assert p.grad is not None
            if (mine.grad - p.grad).norm() > 1e-4 * p.grad.norm():
                raise RuntimeError(f"{name} does other work than {OURS}: the gradient of {what} is another")
    return layers


def heat(size: Size, turns: Turns) -> Times:
    """Runs on every rank."""
    group = Group.world()
    steps: dict[str, Callable[[], object]] = dict(contestants(size, group))
    return race(group, steps, turns)


def measure(ranks: Sequence[int], sizes: Sequence[Size], turns: Turns, rounds: int = 1) -> Iterator[list[Row]]:
    """The rows of one heat (ranks, size) at a time. The ranks must divide the experts."""
    for size in sizes:
        for count in ranks:
            times = by_pages(both_worlds(heat, size, turns, ranks=count, rounds=rounds))
            yield rank_rows(medians(times), count, size)


def rank_rows(ms_of: dict[str, dict[str, float]], ranks: int, size: Size) -> list[Row]:
    """One row an implementation and kind of pages."""
    best = {pages: min(ms for name, ms in world.items() if name != OURS) for pages, world in ms_of.items()}
    least = min(best.values())
    return [
        Row(
            name, ranks, **vars(size), pages=pages, ms=ms, ratio_same_pages=ms / best[pages], ratio_any_pages=ms / least
        )
        for pages, world in ms_of.items()
        for name, ms in world.items()
    ]
