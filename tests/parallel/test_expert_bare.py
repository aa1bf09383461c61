"""Blocks that index their experts' tensors, made expert-parallel: recognised whatever their layout, or refused."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worlds import run

from refimpl.comm.axes import Axes
from refimpl.comm.group import Group
from refimpl.engine.initialize import initialize
from refimpl.parallel.expert.auto import autoep, expert_portions

EXPERTS, WIDTH, INNER = 6, 8, 5
BOUND = 64 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Kind:
    k: int = 2
    apart: bool = False
    out_first: bool = True
    gate_last: bool = False
    act: Callable[[Tensor], Tensor] = F.silu
    sigmoid: bool = False
    sums_to_one: bool = True
    odd: str = ""  # what makes it one that nobody can know


class Block(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind, self.num_experts, self.width = kind, EXPERTS, WIDTH
        if kind.k < 3:  # else it says nowhere how many a token takes
            self.top_k = kind.k
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Module()
        shapes = {"w1": (INNER, WIDTH), "w3": (INNER, WIDTH)} if kind.apart else {"both": (2 * INNER, WIDTH)}
        for name, shape in (shapes | {"w2": (WIDTH, INNER)}).items():
            stored = shape if kind.out_first else shape[::-1]
            self.experts.register_parameter(name, nn.Parameter(torch.randn(EXPERTS, *stored) / 2))

    def times(self, x: Tensor, name: str, e: int) -> Tensor:
        weight = getattr(self.experts, name)[e]
        out: Tensor = x @ (weight.T if self.kind.out_first else weight)
        return out

    def forward(self, x: Tensor) -> Tensor:
        kind, flat = self.kind, x.reshape(-1, WIDTH)
        logits = self.gate(flat)
        if kind.odd == "noise" and self.training:
            logits = logits + torch.randn_like(logits)
        if kind.odd == "kept":
            self.seen = logits
        weights, chosen = (logits.sigmoid() if kind.sigmoid else logits.softmax(-1)).topk(kind.k)
        weights = weights / weights.sum(1, keepdim=True) if kind.sums_to_one else weights
        weights = weights.square() if kind.odd == "squared" else weights
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, place = (chosen == e).nonzero(as_tuple=True)
            rows = flat[token]
            gate, up = (
                (self.times(rows, "w1", e), self.times(rows, "w3", e))
                if kind.apart
                else self.times(rows, "both", e).chunk(2, 1)
            )
            gate, up = (up, gate) if kind.gate_last else (gate, up)
            out[token] += self.times(kind.act(gate) * up, "w2", e) * weights[token, place, None]
        return out.view_as(x)


class Net(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.first, self.mlp = nn.Linear(WIDTH, WIDTH), Block(kind)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = x + self.mlp(x)
        return out


def made(kind: Kind, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(kind)


def dealt_out(kind: Kind, ep: int) -> None:
    """Outputs and all gradients are the whole model's, for ranks of unequal numbers of tokens."""
    world = Group.world()
    axes = Axes.of_data(world).with_experts(ep)
    model, whole = made(kind, world.rank), made(kind)
    autoep(model, axes)
    x = torch.randn(2, 1 + 3 * world.rank, WIDTH, generator=torch.Generator().manual_seed(world.rank))
    found, expected = model(x), whole(x)
    assert (found - expected).norm() <= BOUND * expected.norm()
    found.square().sum().backward()
    expected.square().sum().backward()
    portions = expert_portions(model)
    assert len(portions) == len(list(model.mlp.experts.parameters()))
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        grad = q.grad
        if p in portions:
            axes.expert.all_reduce(grad)
            _, first, count, total = portions[p]
            assert total == EXPERTS
            grad = grad[first : first + count]
        assert (p.grad - grad).norm() <= BOUND * grad.norm() + 1e-12, name


@pytest.mark.parametrize(
    "kind",
    [
        Kind(),
        Kind(k=3, apart=True, sums_to_one=False),
        Kind(k=1, out_first=False, gate_last=True, sums_to_one=False),
        Kind(act=F.gelu, sigmoid=True, apart=True, out_first=False),
    ],
    ids=["defaults", "apart", "turned", "gelu"],
)
def test_recognised(kind: Kind) -> None:
    run(dealt_out, kind, 3, ranks=3)


def trained(ep: int | None, stage: int) -> list[float | None]:
    """Gradient norms of three steps."""
    config: dict[str, Any] = {"train_batch_size": 12, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.05}}
    if ep is not None:  # as DeepSpeed's tests have it
        config["expert_parallel"] = {"enabled": True, "autoep_size": ep, "load_balance_coeff": None}
    engine, *_ = initialize(model=made(Kind()), config=config)
    norms = []
    for step in range(3):
        x = torch.randn(12, 4, WIDTH, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x.chunk(engine.axes.feeds)[engine.axes.feed]).square().mean())
        engine.step()
        norms.append(engine.stage.grad_norm)
    return norms


def test_trained_in_every_stage() -> None:
    (alone,) = run(trained, None, 0, ranks=1)
    for ranks, ep, stage in ((2, 2, 2), (4, 2, 3), (3, 3, 1)):
        torch.testing.assert_close(run(trained, ep, stage, ranks=ranks)[0], alone, rtol=5e-5, atol=0)


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ("squared", "indexes its experts' tensors, and is no sum of k gated experts"),
        ("noise", "or others in training"),
        ("kept", "keeps seen at each call"),
    ],
)
def test_refused(odd: str, says: str) -> None:
    with pytest.raises(ValueError, match=rf"mlp.experts \(Module\): its block \(Block\).* {says}"):
        autoep(made(Kind(odd=odd)), Axes.of_data(Group(None)))


def test_tokens_alone() -> None:
    model = made(Kind())
    autoep(model, Axes.of_data(Group(None)))
    with pytest.raises(TypeError, match="takes tokens alone"):
        model.mlp(torch.randn(3, WIDTH), mask=None)
