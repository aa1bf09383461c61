"""Ranks that train alone, in one process: the oracle of local SGD and DiLoCo, and a model hard to average."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim

from refimpl.comm.group import Group

Make = Callable[[list[nn.Parameter]], optim.Optimizer]


class Net(nn.Module):
    """Odd sizes; a tied weight, a frozen one, one that nothing uses, and a running mean."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 5), nn.Linear(5, 7, bias=False)
        self.again = nn.Linear(7, 5, bias=False)
        self.again.weight = self.a.weight
        self.unused = nn.Parameter(torch.randn(3, 11) / 3)
        self.fixed = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("running", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 7] -> loss."""
        self.running += x.detach().mean()
        return (self.again(self.b(torch.tanh(self.a(x)))) * self.fixed - x[:, :5]).square().mean()


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(1)
    return Net().to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[4, 7], another on each rank and in each step."""
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def adamw(params: list[nn.Parameter]) -> optim.Optimizer:
    return optim.AdamW([p for p in params if p.requires_grad], lr=3e-2, weight_decay=0.1)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(model: nn.Module, optimizer: optim.Optimizer, rank: int, steps: range, outer: Any = None) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step, dtype)).backward()
        optimizer.step()
        if outer is not None:
            outer.step()


def one_process(
    ranks: int,
    rounds: int,
    every: int,
    inner: Make = adamw,
    outer: Make | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The weights after `rounds` rounds: means of weights, or of distances with an `outer` optimizer. By the papers."""
    start = net(dtype or torch.float32)
    workers = [copy.deepcopy(start) for _ in range(ranks)]
    optimizers = [inner(list(worker.parameters())) for worker in workers]
    theta = [nn.Parameter(p.detach().float()) for p in start.parameters()]
    second = outer(theta) if outer else None
    for turn in range(rounds):
        for rank, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            train(worker, optimizer, rank, range(turn * every, (turn + 1) * every))
        with torch.no_grad():
            columns = list(zip(*(worker.parameters() for worker in workers), strict=True))
            for t, column in zip(theta, columns, strict=True):
                if not column[0].requires_grad:
                    continue
                begun = t.to(column[0].dtype).float()
                sums = [begun - p if second else p.float() for p in column]
                total = sums[0].clone()
                for more in sums[1:]:
                    total += more
                if second:
                    t.grad = total / ranks
                else:
                    t.copy_(total / ranks)
            if second:
                second.step()
            for t, column in zip(theta, columns, strict=True):
                for p in column:
                    p.copy_(t)
    return flat(workers[0])


def everyone_has(mine: Tensor) -> list[Tensor]:
    """Every rank's copy."""
    return [torch.as_tensor(other) for other in Group.world().all_gather_object(mine)]
