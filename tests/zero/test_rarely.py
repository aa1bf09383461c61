"""Two nodes of two ranks: near ranks are one stage, far ranks meet rarely, by shards. One process's bits."""

import copy
from typing import Any

import pytest
import torch
import worlds
from torch import Tensor, nn, optim

from refimpl.comm.axes import neighbours
from refimpl.comm.group import Group
from refimpl.optim.diloco import DiLoCo
from refimpl.optim.local_sgd import LocalSGD
from refimpl.zero.config import ZeroConfig
from refimpl.zero.ddp import DDP
from refimpl.zero.rarely import shards_of
from refimpl.zero.stage import Stage
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero2 import Zero2
from refimpl.zero.zero3 import Zero3

STAGES: dict[str, type[Stage]] = {"ddp": DDP, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
EVERY, STEPS, NODES, NEAR = 2, 4, 2, 2


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen one and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(9, 5), nn.Linear(5, 9)
        self.again = nn.Linear(9, 5, bias=False)
        self.again.weight = self.a.weight
        self.unused = nn.Parameter(torch.randn(7))
        self.fixed = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.again(self.b(torch.tanh(self.a(x)))) * self.fixed - x[:, :5]).square().mean()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(100 * step + rank))


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-2)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def sgd(theta: list[nn.Parameter]) -> optim.Optimizer:
    return optim.SGD(theta, lr=0.7, momentum=0.9, nesterov=True)


def on_nodes(name: str, kind: str, dtype: torch.dtype | None, resume: bool) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The weights by name after two rounds, and what this rank sent far, in bytes."""
    world = Group.world()
    near, far = neighbours(world, NEAR)

    def begin() -> tuple[Stage, Any]:
        model = Net()
        if world.rank >= NEAR:
            nn.init.ones_(model.fixed)  # the first node's are taken
        config = ZeroConfig(dtype=dtype, reduce_bucket_size=60)
        stage = STAGES[name](model, adamw(model), near, config)
        outer = DiLoCo(shards_of(stage), EVERY, far) if kind == "diloco" else LocalSGD(shards_of(stage), EVERY, far)
        return stage, outer

    stage, outer = begin()
    far.ledger.reset()
    for step in range(STEPS):
        if resume and step == EVERY + 1:
            saved = copy.deepcopy([stage.state_dict(), outer.state_dict()])
            stage, outer = begin()
            stage.load_state_dict(saved[0])
            outer.load_state_dict(saved[1])
        stage.model(batch(world.rank, step).to(dtype or torch.float32)).backward()
        stage.optimizer.step()
        stage.optimizer.zero_grad()
        outer.step()
    sent = far.ledger.sent_bytes("tag")
    state = stage.full_state_dict()
    whole = {n: t.float().clone() for n, t in state.items()} if state is not None else {}
    owned = sum(tensor.numel() for tensor in outer.weights.read())
    return whole, {"sent": sent["outer gradients" if kind == "diloco" else "weights"], "owned": owned}


def by_hand(kind: str) -> Tensor:
    """A process a node, which accumulates its ranks' batches; then the papers' rules."""
    nodes = [Net() for _ in range(NODES)]
    optimizers = [adamw(node) for node in nodes]
    theta = [nn.Parameter(p.detach().clone()) for p in nodes[0].parameters()]
    outer = sgd(theta)
    for step in range(STEPS):
        for n, (node, optimizer) in enumerate(zip(nodes, optimizers, strict=True)):
            optimizer.zero_grad()
            for rank in range(NEAR):
                node(batch(n * NEAR + rank, step)).backward()
            for p in node.parameters():
                if p.grad is not None:
                    p.grad /= NEAR
            optimizer.step()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                for t, *column in zip(theta, *(node.parameters() for node in nodes), strict=True):
                    t.grad = ((t - column[0]) + (t - column[1])) / NODES if column[0].requires_grad else None
                    if kind == "local":
                        t.copy_((column[0] + column[1]) / NODES)
                if kind == "diloco":
                    outer.step()
                for node in nodes:
                    for t, p in zip(theta, node.parameters(), strict=True):
                        p.copy_(t)
    return flat(nodes[0])


@pytest.mark.parametrize(
    ("name", "kind", "resume"),
    [("ddp", "diloco", True), ("zero1", "local", False), ("zero2", "diloco", False), ("zero3", "diloco", True)],
)
def test_near_ranks_at_every_step_far_ranks_rarely(name: str, kind: str, resume: bool) -> None:
    results = worlds.run(on_nodes, name, kind, None, resume, ranks=4)
    expected, model = by_hand(kind), Net()
    weights = dict(model.named_parameters())
    found = torch.cat([results[0][0][n].flatten() for n in weights])
    assert found.equal(expected)
    for _, far in results:
        assert far["owned"] == (192 if name == "zero3" else 128)  # half of each bucket, padded to 128
        assert far["sent"] % (4 * far["owned"]) == 0  # 2 n (F-1)/F is n for two nodes


def test_fp32_masters_are_what_meets() -> None:
    results = worlds.run(on_nodes, "zero2", "local", torch.bfloat16, False, ranks=4)
    assert results[0][0]["a.weight"].equal(results[0][0]["a.weight"].bfloat16().float())
    assert results[0][1]["sent"] == 2 * 4 * results[0][1]["owned"]  # fp32, twice


def test_a_stage_needs_an_optimizer() -> None:
    with pytest.raises(RuntimeError, match="has no optimizer"):
        shards_of(Zero1(Net()))
