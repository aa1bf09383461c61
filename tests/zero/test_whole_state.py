"""A state that an optimizer saved without a stage goes on under one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import STAGES
from worlds import run

from refimpl.launch import RankError
from refimpl.offload.homes import Host
from refimpl.optim.loss_scale import DynamicLossScaler
from refimpl.zero.config import ZeroConfig


class Small(nn.Sequential):
    """With a parameter of the shape of Adam's `step`."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3), nn.Linear(3, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, layers: int = 4) -> Tensor:
        for layer in list(self)[:layers]:
            x = layer(x)
        return x * self.scale


def small(width: int = 7) -> nn.Module:
    torch.manual_seed(0)
    return Small(width)


def two_groups(model: Any, lr: float = 0.01) -> torch.optim.Optimizer:
    biases = [model.scale, *(layer.bias for layer in (model[3], model[0], model[2]))]
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": [model[2].weight, model[0].weight, model[3].weight]}]
    return torch.optim.AdamW(groups, lr=lr)


def momentum(model: Any, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def steps(model: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """The last layer has no gradient in steps 0 and 1: its state begins later."""
    for i in range(first, last):
        x: Tensor = torch.randn(4, 5, generator=torch.Generator().manual_seed(i)).to(model[0].bias.dtype)
        model(x, 4 if i > 1 else 3).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def goes_on(
    stage_name: str, make: Callable[..., torch.optim.Optimizer], config: ZeroConfig, used: int, thaws: bool = False
) -> None:
    """thaws: the first layer is trained from the load on."""
    alone, model = small(), small()
    by = make(alone)
    steps(alone, by, 0, used)
    saved = copy.deepcopy((alone.state_dict(), by.state_dict()))
    for state in saved[1]["state"].values() if config.dtype else ():  # by a model that was itself in 16 bits
        state |= {key: x.to(config.dtype) for key, x in state.items() if key != "step"}
    optimizer = make(model, lr=5.0)
    model.get_submodule("0").requires_grad_(not thaws)
    stage = STAGES[stage_name](model, optimizer, config=config)
    steps(model, optimizer, 0, 1)  # what was here before is gone afterwards
    model.requires_grad_(True)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert all(x.dtype == torch.float32 for state in optimizer.state.values() for x in state.values())
    steps(alone, by, used, used + 3)
    steps(model, optimizer, used, used + 3)
    bounds = {"rtol": 2e-2, "atol": 5e-3} if config.dtype else {"rtol": 1e-5, "atol": 1e-7}
    for name, p in alone.named_parameters():
        torch.testing.assert_close(stage.full_parameter(name).float(), p.detach(), **bounds)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("make", [two_groups, momentum])
@pytest.mark.parametrize("stage", list(STAGES))
def test_what_a_plain_run_saved_goes_on(stage: str, make: Callable[..., torch.optim.Optimizer], ranks: int) -> None:
    """torch's ZeroRedundancyOptimizer takes it as well; every rank cuts out what it holds."""
    run(goes_on, stage, make, ZeroConfig(reduce_bucket_size=20), 4, ranks=ranks)
    run(goes_on, stage, make, ZeroConfig(), 2, ranks=ranks)  # the last layer has no state yet


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_into_a_home_and_onto_masters(stage: str) -> None:
    run(goes_on, stage, two_groups, ZeroConfig(optimizer_home=Host()), 2)
    run(goes_on, stage, two_groups, ZeroConfig(dtype=torch.bfloat16), 2)


@pytest.mark.parametrize("stage", list(STAGES))
def test_what_was_thawed_before_the_load_takes_its_state_too(stage: str) -> None:
    """It had none, without a word: what is thawed is laid out by the next forward, which came behind the load."""
    run(goes_on, stage, momentum, ZeroConfig(), 4, True)


def halves(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def saved_by_a_plain_loop(stage_name: str, config: ZeroConfig) -> None:
    """Model and optimizer, of each rank by itself, are loaded in any order, or the optimizer alone."""
    scaler = (lambda: DynamicLossScaler(64.0, window=2)) if config.dtype == torch.float16 else (lambda: None)

    def start(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = Small(7)
        return model, STAGES[stage_name](model, halves(model), None, config, scaler())

    def train(of: tuple[nn.Module, Any], first: int, last: int) -> list[float]:
        scales = []
        for i in range(first, last):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(i)).to(config.dtype)
            of[1].backward(of[0](x).float().square().mean())
            of[1].step()
            scales.append(of[1].loss_scale())
        return scales

    one = start(0)
    train(one, 0, 3)
    saved = copy.deepcopy({"model": one[0].state_dict(), "optimizer": one[1].optimizer.state_dict()})
    exact = {name: one[1].full_parameter(name) for name in one[0].state_dict()}
    scales = train(one, 3, 5)
    for order in (["model", "optimizer"], ["optimizer", "model"], ["optimizer"]):
        two = start(1)
        train(two, 0, 1)
        for what in order:  # torch's optimizers train on in what they are given
            (two[0] if what == "model" else two[1].optimizer).load_state_dict(copy.deepcopy(saved[what]))
        assert train(two, 3, 5) == scales
        for name in one[0].state_dict():
            assert torch.equal(one[1].full_parameter(name), two[1].full_parameter(name)), (order, name)
    wide = small()
    stage = STAGES[stage_name](wide, halves(wide), config=ZeroConfig(reduce_bucket_size=20))
    stage.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    assert all(torch.equal(stage.full_parameter(name), w) for name, w in exact.items()), "in fp32 from now on"


@pytest.mark.parametrize(
    ("dtype", "home", "ranks"), [(torch.bfloat16, None, 3), (torch.float16, None, 2), (torch.bfloat16, Host, 2)]
)
@pytest.mark.parametrize("stage", list(STAGES))
def test_what_was_rounded_off_goes_on(stage: str, dtype: torch.dtype, home: Any, ranks: int) -> None:
    """DeepSpeed's `optimizer.state_dict()` has the fp32 weights, too."""
    config = ZeroConfig(dtype=dtype, optimizer_home=home and home(), reduce_bucket_size=20)
    run(saved_by_a_plain_loop, stage, config, ranks=ranks)


def adafactor(model: Any, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=lr)


def test_a_state_that_is_not_cut_like_its_parameter_goes_on_at_stage_0() -> None:
    run(goes_on, "ddp", adafactor, ZeroConfig(), 2)


def another(stage_name: str, width: int, make: Callable[..., torch.optim.Optimizer]) -> None:
    theirs, model = small(width), small()
    by, optimizer = make(theirs), two_groups(model)
    steps(theirs, by, 0, 3)
    STAGES[stage_name](model, optimizer)
    optimizer.load_state_dict(by.state_dict())


@pytest.mark.parametrize("stage", list(STAGES))
def test_another_models_state_is_refused(stage: str) -> None:
    with pytest.raises(RankError, match=r"exp_avg of 0.bias has the shape \(9,\), the parameter \(7,\)"):
        run(another, stage, 9, two_groups)
    with pytest.raises(RankError, match=r"this state has groups of \[7\] parameters, here \[4, 3\]"):
        run(another, stage, 7, momentum)
