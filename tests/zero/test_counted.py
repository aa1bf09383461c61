"""An optimizer that counts beside its groups and the states of its parameters, as pytorch_optimizer's MADGRAD does."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from training import STAGES, Net, differing, tokens
from worlds import run

import refimpl
from refimpl.comm.group import Group
from refimpl.offload.homes import Disk, Host
from refimpl.zero.config import ZeroConfig

HOMES = {"host": lambda folder: Host(), "disk": lambda folder: Disk(folder)}


class Counting(optim.Optimizer):
    """Its rate falls with a count in its state and with one that is its own: p -= lr / (k + 1) / (n + 1) sign(grad)."""

    elementwise = True
    n = 0

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        state: dict[Any, Any] = self.state
        count = state.setdefault("k", torch.zeros(1))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.3)
                    p.sub_(group["lr"] / (float(count) + 1) / (self.n + 1) * mean)
        count.add_(1)
        self.n = self.n + 1


class Born(Counting):
    """Its count is made by the constructor, as in Facebook's MADGRAD."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.state["k"] = torch.zeros(1)  # type: ignore[index]


def trained(stage: str, kind: type[Counting], home: Host | None, **options: Any) -> dict[str, Tensor]:
    """Runs on every rank."""
    torch.manual_seed(0)
    model, group = Net(), Group.world()
    config = ZeroConfig(reduce_bucket_size=700, optimizer_home=home, sub_group_size=128, **options)
    built = STAGES[stage](model, kind(model.parameters()), group, config)
    for step in range(4):
        built.backward(built.model(tokens(step, group.rank)))
        built.step()
    return {name: built.full_parameter(name) for name in built.names.values()}


@pytest.mark.parametrize("kind", [Counting, Born])
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_parts_count_a_step_once(stage: str, home: str, kind: type[Counting], tmp_path: Path) -> None:
    """Each part counted for the next one in `state`, and no part in an attribute."""

    def check() -> list[str]:
        away = HOMES[home](tmp_path)
        part_of = trained(stage, kind, away, offload_ratio=0.5) if home == "host" else {}
        plain = trained("ddp", kind, None)
        return differing(plain, trained(stage, kind, away)) + differing(plain, part_of or plain)

    assert run(check, ranks=2) == [[], []]


class FusedAdam(Counting):
    """Called as apex's is, and counting as it does: in its groups."""

    elementwise = False
    __module__ = "apex.optimizers.fused_adam"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.3)
                    p.sub_(group["lr"] / group["step"] * mean)


def test_apex_fused_adam_is_cut_as_in_deepspeed() -> None:
    """Megatron's own, where apex is installed: it was refused from ZeRO-1 on."""

    def check() -> list[str]:
        plain, cut = trained("ddp", FusedAdam, None), trained("zero1", FusedAdam, None)
        return differing(plain, cut) + differing(plain, trained("zero3", FusedAdam, Host()))

    assert run(check, ranks=2) == [[], []]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(9, 7), nn.Linear(7, 9)

    def forward(self, x: Tensor) -> Tensor:
        return (self.out(self.into(x).tanh()) - x).square().mean()


def start(stage: int, offload: bool = False) -> refimpl.Engine:
    more = {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 64} if offload and stage == 3 else {}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **more},
    }
    model = Model()
    return refimpl.initialize(model=model, optimizer=Counting(model.parameters()), config=config)[0]


def train(engine: refimpl.Engine, steps: range) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(10 * engine.group.rank + step)
        engine.backward(engine(torch.randn(4, 9, generator=draw)))
        engine.step()


@pytest.mark.parametrize("stages", [(0, 0), (1, 3), (3, 1)])
def test_a_checkpoint_has_the_count(stages: tuple[int, int], tmp_path: Path) -> None:
    """It was left out, and a run that went on began to count anew."""

    def check() -> tuple[float, float]:
        first = start(stages[0])
        train(first, range(3))
        first.save_checkpoint(tmp_path)
        second = start(stages[1], offload=True)
        train(second, range(7, 12))
        second.load_checkpoint(tmp_path)
        assert first.optimizer is not None
        assert second.optimizer is not None
        return float(first.optimizer.state["k"]), float(second.optimizer.state["k"])  # type: ignore[index]

    assert run(check, ranks=2) == [(3, 3)] * 2


def test_a_state_of_one_process_has_the_count() -> None:
    def check() -> float:
        model = Model()
        alone = Counting(model.parameters())
        for _ in range(3):
            model(torch.ones(4, 9)).backward()
            alone.step()
        stage = STAGES["zero2"](again := Model(), Counting(again.parameters()), Group.world())
        stage.optimizer.load_state_dict(deepcopy(alone.state_dict()))
        return float(stage.optimizer.state["k"])  # type: ignore[index]

    assert run(check, ranks=2) == [3, 3]


def test_what_is_counted_is_not_taken_for_memory_of_a_parameter() -> None:
    def check() -> int:
        model = Model()
        stage = STAGES["zero1"](model, Born(model.parameters()), Group.world())
        stage.backward(stage.model(torch.ones(4, 9)))
        stage.step()
        return sum(t.numel() for t in stage.update.state())

    (numel,) = {*run(check, ranks=2)}
    assert numel == 128  # a mean of half of 9 x 7, 7, 7 x 9 and 9 elements, padded
