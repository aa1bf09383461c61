"""PowerSGD beside torch's hook: the same Q gives the same gradients and the same errors, and so does training alike."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

from refimpl.comm.group import Group
from refimpl.compress.powersgd import LowRank, PowerSGD, orthonormal

STEPS = 6


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 17), nn.Tanh(), nn.Linear(17, 30, bias=False))


def gradient(model: nn.Module, rank: int, step: int) -> Tensor:
    """Of one rank, flat, in the order of torch's bucket: the last layer first."""
    model.zero_grad()
    x = torch.randn(32, 24, generator=torch.Generator().manual_seed(10 * step + rank))
    model(x).square().sum().backward()
    return torch.cat([p.grad.view(-1) for p in reversed(list(model.parameters())) if p.grad is not None])


def kept(exchange: LowRank) -> Tensor:
    return exchange.worker[0].error


def side_by_side(rank: int) -> list[tuple[float, float, float, float, int, int]]:
    """A step of both at a time, from the same Q and the same errors: how far they are apart, and what was lost."""
    group, model, other = Group.world(), net(), net()
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=100)
    state = theirs.PowerSGDState(dist.group.WORLD, rank, start_powerSGD_iter=2, random_seed=1)
    ddp.register_comm_hook(state, theirs.powerSGD_hook)
    params = list(reversed(list(other.parameters())))
    ours = LowRank(group, PowerSGD(rank), sum(p.numel() for p in params), [p.shape for p in params])
    result = []
    for step in range(STEPS):
        local = gradient(other, group.rank, step)
        mine = torch.empty_like(local)
        if step > 2:  # their second compressed step and those after it
            at, memory = 0, state.q_memory_dict[0].clone()
            ours.q = []
            for _, rows, columns in ours.matrices:
                r = ours.power.rank_of(rows, columns)
                ours.q.append(memory[at : at + columns * r].view(columns, r))
                at += columns * r
            ours.accept()
            ours.worker[0].error.copy_(state.error_dict[0])
            group.ledger.reset()
            ours.mean(local, mine).wait()
            sent = sum(group.ledger.sent_bytes().values())
        theirs_flat = gradient(ddp, group.rank, step)
        if step > 2:
            size = theirs_flat.norm()
            # Of matrices: torch also keeps how far a rank's vectors are from their mean, which adds up to nothing.
            both = (kept(ours), state.error_dict[0])
            error, expected = (torch.cat([m.reshape(-1) for m in ours.rows(each)]) for each in both)
            apart = (mine - theirs_flat).norm() / size, (error - expected).norm() / expected.norm()
            result.append((*map(float, apart), float(error.norm()), float(expected.norm()), sent, ours.sent_bytes()))
            ours.accept()
    return result


@pytest.mark.parametrize(("rank", "ranks"), [(1, 2), (4, 3)])
def test_a_step_is_that_of_torchs_hook(rank: int, ranks: int) -> None:
    for result in worlds.run(side_by_side, rank, ranks=ranks):
        assert len(result) == STEPS - 3
        for gradients, errors, lost, expected, sent, formula in result:
            assert gradients < 1e-5
            assert errors < 1e-4
            assert lost == pytest.approx(expected, rel=1e-4)
            assert sent == formula


def train(rank: int, torchs: bool) -> list[float]:
    """The share of the mean gradient that is lost in each step, errors included, each by itself from its own Q."""
    group, model = Group.world(), net()
    params = list(reversed(list(model.parameters())))
    n = sum(p.numel() for p in params)
    ours = LowRank(group, PowerSGD(rank), n, [p.shape for p in params])
    state: Any = theirs.PowerSGDState(dist.group.WORLD, rank, start_powerSGD_iter=2)
    trained = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=100) if torchs else model
    if torchs:
        trained.register_comm_hook(state, theirs.powerSGD_hook)  # type: ignore[operator]
    lost = []
    for step in range(40):
        flat = gradient(trained, group.rank, step % 4)
        if not torchs and step >= 2:
            ours.mean(flat, flat).wait()
            ours.accept()
        elif not torchs:
            group.all_reduce(flat, "mean")
        with torch.no_grad():
            for p, mean in zip(params, flat.split([p.numel() for p in params]), strict=True):
                p -= 1e-4 * mean.view(p.shape)
        if step >= 2:
            error = (state.error_dict[0] if torchs else ours.worker[0].error).clone()
            group.all_reduce(error, "mean")
            lost.append(float(error.norm() / flat.norm()))
    return lost


def test_over_a_training_both_lose_the_same() -> None:
    """From different random Q, so not the same bits: the mean error over the last steps agrees within 5%."""
    ours, torchs = (worlds.run(train, 2, kind)[0] for kind in (False, True))
    assert sum(ours[20:]) == pytest.approx(sum(torchs[20:]), rel=0.05)


def whole(n: int, shapes: list[torch.Size], op: str) -> tuple[Tensor, Tensor, int, int]:
    group = Group.world()
    x, out = torch.randn(n, generator=torch.Generator().manual_seed(group.rank)), torch.empty(n)
    exchange = LowRank(group, PowerSGD(3), n, shapes)
    exchange.mean(x, out, op).wait()  # type: ignore[arg-type]
    total = x.clone()
    group.all_reduce(total, op)  # type: ignore[arg-type]
    error = kept(exchange).clone()
    group.all_reduce(error, op)  # type: ignore[arg-type]
    return out + error - total, total, sum(group.ledger.sent_bytes().values()), exchange.sent_bytes()


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_what_is_sent_and_what_is_kept_are_everything(op: str) -> None:
    """Of matrices, of a tensor of four dimensions, of vectors, of numbers and of nothing."""
    shapes = [torch.Size(s) for s in [(20, 30), (7,), (), (0, 5), (16, 3, 3, 3), (2, 2), (30, 20)]]
    for apart, total, _, _ in worlds.run(whole, sum(map(math.prod, shapes)), shapes, op, ranks=3):
        assert apart.norm() < 1e-5 * total.norm()


def test_columns_that_depend_on_each_other_do_no_harm() -> None:
    """torch's Gram-Schmidt divides by zero there: a matrix of zeros, as of an unused layer, becomes NaN."""
    zero = torch.zeros(9, 2)
    assert torch.allclose(orthonormal(zero).T @ orthonormal(zero), torch.eye(2))
    matrices = zero.clone()[None]
    theirs._orthogonalize(matrices)
    assert matrices.isnan().all()
    exchange, out = LowRank(Group(None), PowerSGD(2), 600, [torch.Size((20, 30))]), torch.empty(600)
    exchange.mean(torch.zeros(600), out).wait()
    assert not out.any()
    x = (torch.randn(20, 1) @ torch.randn(1, 30)).view(-1)
    for _ in range(2):  # the first Q is that of zeros
        exchange.mean(x, out).wait()
        exchange.accept()
    assert float(exchange.worker[0].error.norm()) < 1e-4 * float(x.norm())


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="the shapes have 600"):
        LowRank(Group(None), PowerSGD(), 601, [torch.Size((20, 30))])
