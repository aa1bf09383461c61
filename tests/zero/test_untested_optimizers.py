"""Optimizers of other people's making: cut only where a trial shows that they may be; with modes and counts."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from training import STAGES
from worlds import run

from refimpl.comm.group import Group
from refimpl.offload.homes import Disk
from refimpl.zero.config import ZeroConfig
from refimpl.zero.kind import Kind


class Descent(optim.Optimizer):
    """p -= lr * direction(gradient)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "size": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.direction(p.grad, group))

    def direction(self, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad.sign()


class OfNorms(Descent):
    def direction(self, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad / grad.norm()


class OfMatrices(Descent):
    def direction(self, grad: Tensor, group: dict[str, Any]) -> Tensor:
        if grad.ndim != 2:
            raise ValueError("a matrix, please")
        return grad


class Estimating(Descent):
    """Weights show nothing of it yet: what it has estimated of all of them will."""

    def direction(self, grad: Tensor, group: dict[str, Any]) -> Tensor:
        group["size"] += float(grad.square().sum())
        return grad


class Counting(Descent):
    """Element-wise, with a count in the group, and other weights in evaluation: as schedule-free ones have it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group |= {"k": 0, "train_mode": False}

    def step(self, closure: Any = None) -> None:
        assert all(group["train_mode"] for group in self.param_groups)
        for group in self.param_groups:
            group["k"] += 1
        super().step()

    def direction(self, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad / group["k"]

    def train(self) -> None:
        self.turn(True, 2.0)

    def eval(self) -> None:
        self.turn(False, 0.5)

    @torch.no_grad()
    def turn(self, mode: bool, factor: float) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != mode and group["k"] else ():
                p.mul_(factor)
            group["train_mode"] = mode


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 9))  # more than one rank's 64 elements


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize(
    ("kind", "fails"),
    [
        (Descent, ""),
        (Counting, ""),
        (OfNorms, "it computes other weights"),
        (OfMatrices, "tried on a part of a parameter it raises ValueError: a matrix, please"),
        (Estimating, "on a part of a parameter its size is another"),
        (optim.Adafactor, "it computes other weights"),
        (optim.LBFGS, "tried by itself it raises TypeError: .*closure"),
    ],
)
def test_what_is_allowed_is_tried(kind: Callable[..., Any], fails: str) -> None:
    """Also where a schedule begins with no rate; neither random numbers nor the optimizer itself are changed."""
    optimizer, state = (
        kind([nn.Parameter(torch.ones(2, 3))], lr=0.0 if kind is not Estimating else 0.1),
        torch.get_rng_state(),
    )
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    found = Kind(optimizer, allow_untested=True)
    assert found.elementwise == (not fails)
    with pytest.raises(TypeError, match=fails) if fails else nullcontext():
        found.refuse_shard()
    assert settings == {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    assert torch.get_rng_state().equal(state)


def allowed(stage_name: str, kind: Callable[..., Any]) -> list[Tensor]:
    model, group = small(), Group.world()
    optimizer = kind(model.parameters(), lr=0.1)
    STAGES[stage_name](model, optimizer, group, ZeroConfig(allow_untested_optimizer=True))
    for step in range(3):
        model(batch(step, group.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [w.clone() for w in model.state_dict().values()]


def alone(kind: Callable[..., Any], ranks: int) -> list[Tensor]:
    model = small()
    optimizer = kind(model.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(ranks):
            (model(batch(step, rank)).square().mean() / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [w.detach() for w in model.state_dict().values()]


@pytest.mark.parametrize("kind", [OfNorms, optim.Adafactor])
def test_what_needs_whole_parameters_has_them_at_stage_0_and_is_refused_behind_it(kind: Callable[..., Any]) -> None:
    """accelerate and transformers allow every optimizer: that alone must not have it cut."""
    expected = alone(kind, 2)
    for weights in run(allowed, "ddp", kind, ranks=2):
        for found, right in zip(weights, expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
    for stage in ("zero1", "zero2", "zero3"):
        with pytest.raises(
            Exception, match=rf"{kind.__name__} is allowed \(zero_allow_untested_optimizer\), but did not pass"
        ):
            run(allowed, stage, kind, ranks=2)


def in_modes(stage_name: str, dtype: torch.dtype | None, folder: Path | None, share: float) -> list[Tensor]:
    """The weights in evaluation after each of three steps; `share` of the optimizer's state rests in `folder`."""
    model, group, seen = small(), Group.world(), []
    optimizer = Counting(model.parameters())
    home = {} if folder is None else {"optimizer_home": Disk(folder), "sub_group_size": 20, "offload_ratio": share}
    config = ZeroConfig(dtype=dtype, allow_untested_optimizer=True, reduce_bucket_size=40, **home)
    STAGES[stage_name](model, optimizer, group, config)
    for step in range(3):
        optimizer.train()
        model(batch(step, group.rank).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.train()  # as transformers' Trainer does before each batch
        optimizer.eval()
        seen += [w.float().clone() for w in model.state_dict().values()]
    return seen


def modes_alone(ranks: int) -> list[Tensor]:
    model, seen = small(), []
    optimizer = Counting(model.parameters())
    for step in range(3):
        optimizer.train()
        for rank in range(ranks):
            (model(batch(step, rank)).square().mean() / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        seen += [w.detach().clone() for w in model.state_dict().values()]
    return seen


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("where", ["fp32", "bf16", "disk", "half of it on a disk"])
def test_modes_of_an_optimizer_reach_the_weights_of_all_ranks(stage: str, where: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if where == "bf16" else None
    near = {"rtol": 2e-2, "atol": 4e-3} if dtype else {"rtol": 1e-5, "atol": 1e-6}
    share = 0.5 if "half" in where else 1.0
    for found in run(in_modes, stage, dtype, tmp_path if "disk" in where else None, share, ranks=2):
        for weights, right in zip(found, modes_alone(2), strict=True):
            torch.testing.assert_close(weights, right, **near)
