"""Parameters that only some ranks have: reduced, sharded and gathered among them, averaged over all ranks' tokens."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import STAGES
from worlds import run

from refimpl.comm.axes import expert_groups
from refimpl.comm.group import Group
from refimpl.zero.config import ZeroConfig
from refimpl.zero.flat import ALIGN, ALIGN_PARAMETER, round_up

EXPERTS, WIDTH, STEPS = 12, 7, 3  # 12 experts: for 2, 3 and 4 ranks


class Expert(nn.Module):
    """With a buffer that is no other expert's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 1.0 + number))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.scale
        return out.square().mean()


class Experts(nn.ModuleList):
    """The experts `first` to `last`, under the same names on every rank."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__([Expert(e) for e in range(first, last)])
        self.first = first

    def forward(self, loss: Tensor, brought: list[Tensor], unused: int) -> Tensor:
        for number, expert in enumerate(self, self.first):
            for x in brought if number != unused else ():
                loss = loss + expert(x + number)
        return loss


class Layers(nn.Module):
    """A dense layer, a frozen expert, and experts."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        torch.manual_seed(99)
        self.dense = nn.Linear(WIDTH, 5)
        self.experts = Experts(first, last)
        self.frozen = Expert(50 + first).requires_grad_(False)

    def forward(self, own: Tensor, brought: list[Tensor], unused: int) -> Tensor:
        """This rank's tokens for the dense layer; those of its experts from all that share experts with it."""
        loss: Tensor = self.dense(own).square().mean() + 0 * self.frozen(own)
        out: Tensor = self.experts(loss, brought, unused)
        return out

    def whole_name(self, name: str) -> str:
        """A name here -> in a model that has all experts."""
        return re.sub(r"experts\.(\d+)", lambda found: f"experts.{self.experts.first + int(found[1])}", name)


def tokens(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def trained(kind: str, ep: int) -> tuple[dict[str, Tensor], list[float], dict[str, int], int]:
    """Weights by name, the norms, bytes sent in the last step by tag, elements of optimizer state; on each rank."""
    world = Group.world()
    expert, same = expert_groups(world, ep)
    each = EXPERTS // ep
    model = Layers(each * expert.rank, each * (expert.rank + 1))
    of_experts = [p for name, p in model.named_parameters() if not name.startswith("dense")]
    config = ZeroConfig(gradient_clipping=0.5, param_persistence_threshold=0)
    stage = STAGES[kind](model, optimizer_of(model), world, config, experts=dict.fromkeys(of_experts, same))
    norms = []
    for step in range(STEPS):
        world.ledger.reset()
        brought = [tokens(step, rank) for rank in expert.ranks]
        stage.backward(model(tokens(step, world.rank), brought, unused=4 if step == 1 else -1))
        stage.step()
        norms.append(stage.grad_norm or 0.0)
    sent = world.ledger.sent_bytes(by="tag")
    state = sum(t.numel() for t in stage.tensors()["optimizer"] if t.dim())
    whole = {name: stage.full_parameter(name) for name, _ in model.named_parameters()}
    whole |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {model.whole_name(name): w for name, w in whole.items()}, norms, sent, state


def one_process(ranks: int) -> tuple[dict[str, Tensor], list[float]]:
    """Every expert in one model, the mean over the ranks' losses."""
    model = Layers(0, EXPERTS)
    optimizer = optimizer_of(model)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            x = tokens(step, rank)
            (model(x, [x], unused=4 if step == 1 else -1) / ranks).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return {name: w.detach().clone() for name, w in model.state_dict().items()}, norms


@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (3, 3), (4, 2), (4, 4), (4, 1)])
def test_experts_train_as_in_one_process(kind: str, ranks: int, ep: int) -> None:
    expected, expected_norms = one_process(ranks)
    seen: set[str] = set()
    for weights, norms, _, _ in run(trained, kind, ep, ranks=ranks):
        torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=0)
        for name in weights:
            if not name.startswith("frozen"):
                torch.testing.assert_close(weights[name], expected[name], rtol=1e-4, atol=1e-5)
                seen.add(name)
    assert seen == {name for name in expected if not name.startswith("frozen")}


@pytest.mark.parametrize("kind", STAGES)
def test_an_expert_that_one_rank_has_sends_no_gradient(kind: str) -> None:
    """What a gradient of the dense layer sends is all that is sent; of state every rank keeps its own experts'."""
    dense = 64 * 4  # elements, padded to a multiple of 64 a rank
    once = dense * 4 * 3 // 4  # bytes of a reduce-scatter
    of_one = round_up(56, ALIGN_PARAMETER) + round_up(8, ALIGN_PARAMETER)  # elements
    experts = round_up(EXPERTS // 4 * of_one, ALIGN)
    for _, _, sent, state in run(trained, kind, 4, ranks=4):
        assert sent["gradients"] == (2 * once if kind == "ddp" else once)
        assert state == 2 * (experts + (dense if kind == "ddp" else dense // 4))


def keeps(kind: str) -> list[Any]:
    """What each rank has of its frozen expert and its buffers: nobody else's."""
    expert, same = expert_groups(Group.world(), 2)
    model = Layers(6 * expert.rank, 6 * (expert.rank + 1))
    experts = [p for name, p in model.named_parameters() if not name.startswith("dense")]
    STAGES[kind](model, optimizer_of(model), experts=dict.fromkeys(experts, same))
    fresh = Layers(6 * expert.rank, 6 * (expert.rank + 1))
    model(tokens(0, 0), [tokens(0, 0)], -1).backward()  # buffers are shared before a forward in training
    return [torch.equal(mine, theirs) for mine, theirs in zip(model.buffers(), fresh.buffers(), strict=True)] + [
        torch.equal(stage_weight(model, name), p) for name, p in fresh.frozen.named_parameters()
    ]


def stage_weight(model: nn.Module, name: str) -> Tensor:
    stage: Any = model.get_parameter(f"frozen.{name}").stage
    found: Tensor = stage.full_parameter(f"frozen.{name}")
    return found


@pytest.mark.parametrize("kind", ["ddp", "zero3"])
def test_buffers_and_frozen_experts_stay_each_ranks_own(kind: str) -> None:
    for same in run(keeps, kind, ranks=4):
        assert all(same)


def waiting(op: str) -> None:
    """What waits for a later backward is shown as its reduction makes it; the second backward brings as much again."""
    expert, same = expert_groups(Group.world(), 2)
    model = Layers(6 * expert.rank, 6 * (expert.rank + 1))
    of_experts = [p for name, p in model.named_parameters() if not name.startswith("dense")]
    config = ZeroConfig(gradient_allreduce_op=op)
    stage = STAGES["ddp"](model, optimizer_of(model), config=config, experts=dict.fromkeys(of_experts, same))
    found = []
    for sync in (False, True):
        brought = [tokens(0, rank) for rank in expert.ranks]
        stage.backward(model(tokens(0, Group.world().rank), brought, unused=-1), sync=sync)
        found.append({name: g for name in stage.names.values() if (g := stage.full_gradient(name)) is not None})
    torch.testing.assert_close({name: 2 * g for name, g in found[0].items()}, found[1], rtol=1e-5, atol=1e-8)
    assert len(found[0]) == 2 * 7


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_a_gradient_that_waits_is_the_mean_over_all_ranks_tokens(op: str) -> None:
    run(waiting, op, ranks=4)


def clips(kind: str) -> None:
    expert, same = expert_groups(Group.world(), 2)
    model = Layers(6 * expert.rank, 6 * (expert.rank + 1))
    stage = STAGES[kind](model, optimizer_of(model), experts=dict.fromkeys(model.experts.parameters(), same))
    stage.backward(model(tokens(0, 0), [tokens(0, 0)], -1))
    with pytest.raises(RuntimeError, match=r"set ZeroConfig.gradient_clipping"):
        stage.clip_grad_norm_(1.0)


@pytest.mark.parametrize("kind", ["ddp", "zero2"])
def test_a_norm_of_this_ranks_experts_alone_is_refused(kind: str) -> None:
    run(clips, kind)
