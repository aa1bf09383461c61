"""A class of the script's own on `DeepSpeedEngine`, made without `initialize`, as trainers of speech models have it."""

from typing import Any

import pytest
import torch
import worlds
from torch import Tensor, nn

import refimpl.deepspeed as deepspeed
from refimpl.deepspeed.runtime.engine import DeepSpeedEngine


class Own(DeepSpeedEngine):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        deepspeed.init_distributed("gloo")
        super().__init__(None, *args, **kwargs)
        self._frozen: set[nn.Parameter] = set()

    def freeze_(self) -> None:
        self._frozen.update(p for p in self.module.parameters() if p.requires_grad)
        self.module.requires_grad_(False)

    def unfreeze_(self) -> None:
        for p in self._frozen:
            p.requires_grad_(True)


def config_of(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def trained(stage: int, way: str) -> list[Tensor]:
    """The weights after three steps; an own engine's parameters are frozen and thawed between them."""
    torch.manual_seed(0)
    model, config = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), config_of(stage)
    if way == "initialize":
        engine: DeepSpeedEngine = deepspeed.initialize(model=model, config=config)[0]
    elif way == "config":
        engine = Own(model=model, config=config)
    else:
        engine = Own(model, config=config, config_class=deepspeed.DeepSpeedConfig(config))
    assert engine.mpu is None
    for step in range(3):
        if isinstance(engine, Own):
            engine.freeze_()
            x = torch.ones(2, 5, requires_grad=True)
            engine(x).sum().backward()
            assert x.grad is not None
            engine.unfreeze_()
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + engine.global_rank))
        engine.backward(engine(x).square().mean())
        engine.step()
    assert engine.global_steps == 3
    return [w.clone() for w in engine.module.state_dict().values()]


def each_way(stage: int) -> list[list[Tensor]]:
    return [trained(stage, way) for way in ("initialize", "config", "config_class")]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_trains_as_an_engine_of_initialize(stage: int) -> None:
    for expected, *mine in worlds.run(each_way, stage):
        for weights in mine:
            assert all(map(torch.equal, weights, expected))


def test_its_configuration_is_of_the_ranks_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert deepspeed.DeepSpeedConfig(config_of(0)).train_batch_size == 6


def test_it_needs_one_configuration() -> None:
    with pytest.raises(ValueError, match="needs one configuration"):
        DeepSpeedEngine(model=nn.Linear(2, 2))
