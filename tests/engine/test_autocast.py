"""`torch_autocast`: forward in 16 bits over fp32 parameters, as torch's own autocast has it, at every stage."""

import gc
from typing import Any

import pytest
import torch
import worlds
from torch import Tensor, nn

import refimpl
import refimpl.deepspeed as deepspeed
from refimpl.deepspeed.runtime.engine import autocast_if_enabled
from refimpl.engine.config import load_config
from refimpl.engine.configuration.keys import ConfigError, ConfigWarning

STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 9), nn.LayerNorm(9), nn.Linear(9, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        self.seen.append(x.dtype)
        return self.down(self.norm(x).relu()).float().square().mean()


class Tied(Net):
    """One weight in two products."""

    def __init__(self) -> None:
        super().__init__()
        self.mid, self.again = nn.Linear(9, 9, bias=False), nn.Linear(9, 9, bias=False)
        self.again.weight = self.mid.weight

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(torch.bfloat16)
        return self.down(self.again(self.mid(self.norm(self.up(x))).tanh()).tanh()).float().square().mean()


def config(stage: int, dtype: str, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "torch_autocast": {"enabled": True, "dtype": dtype},
        **more,
    }


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(stage: int, dtype: str, plain: bool, net: type[Net] = Net, script: bool = False) -> list[Tensor]:
    """The weights after a few steps; `plain`: loss.backward() in place of the engine's, `script`: its own autocast."""
    torch.manual_seed(0)
    more = {"torch_autocast": {"enabled": False}} if script else {}
    engine, *_ = refimpl.initialize(model=net(), config=config(stage, dtype) | more)
    for step in range(STEPS):
        with torch.autocast("cpu", getattr(torch, dtype), enabled=script):
            loss = engine(rows(step, engine.global_rank))
        engine.scale(loss).backward() if plain else engine.backward(loss)
        engine.step()
    assert engine.module.seen == [getattr(torch, dtype)] * STEPS
    assert engine.skipped_steps == 0
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [p.detach().clone() for p in engine.module.parameters()]


def by_torch(ranks: int, dtype: str, net: type[Net] = Net, cache: bool = True) -> list[Tensor]:
    """One process; a product by a scale and its inverse, powers of two, changes no bit of these gradients."""
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = 2.0**16 if dtype == "float16" else 1.0
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            with torch.autocast("cpu", getattr(torch, dtype), cache_enabled=cache):
                loss = model(rows(step, rank))
            (loss * scale).backward()
        for p in model.parameters():
            p.grad = p.grad / scale / ranks  # type: ignore[operator]
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("stage", "ranks", "dtype"),
    [(0, 2, "bfloat16"), (1, 3, "float16"), (2, 2, "float16"), (3, 2, "bfloat16"), (3, 3, "float16")],
)
@pytest.mark.parametrize("plain", [False, True])
def test_as_torchs_own_autocast(stage: int, ranks: int, dtype: str, plain: bool) -> None:
    wanted = by_torch(ranks, dtype)
    for found in worlds.run(trained, stage, dtype, plain, ranks=ranks):
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("stage", "script", "cache"), [(1, False, True), (3, False, False), (3, True, True)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_weight_of_two_products_is_torchs_bit_for_bit(stage: int, script: bool, cache: bool, ranks: int) -> None:
    """With the cache its two gradients are added up in 16 bits, without it in fp32."""
    wanted = by_torch(ranks, "bfloat16", Tied, cache)
    assert not all(map(torch.equal, wanted, by_torch(ranks, "bfloat16", Tied, not cache))), "the ways do not differ"
    for found in worlds.run(trained, stage, "bfloat16", False, Tied, script, ranks=ranks):
        assert all(map(torch.equal, found, wanted))


def test_off_a_scripts_own_autocast_goes_on() -> None:
    off = config(1, "bfloat16", torch_autocast={"enabled": False, "dtype": "bfloat16"})
    engine, *_ = refimpl.initialize(model=Net(), config=off)
    with torch.autocast("cpu", torch.bfloat16):
        engine(rows(0, 0))
    engine(rows(0, 0))
    assert engine.module.seen == [torch.bfloat16, torch.float32]
    assert engine.optimizer is not None


def rounded_weights(stage: int, script: bool) -> int:
    """How many tensors of 16 bits and of a weight's shape wait for backward; `script`: by an autocast of its own."""
    more = {"torch_autocast": {"enabled": False}} if script else {}
    engine, *_ = refimpl.initialize(model=Net(), config=config(stage, "bfloat16") | more)
    with torch.autocast("cpu", torch.bfloat16, enabled=script):
        loss = engine(rows(0, engine.global_rank))
    shapes = {(5, 9), (9, 5), (9, 3), (3, 9)}
    tensors = [t for t in gc.get_objects() if type(t) is Tensor]
    waiting = sum(t.dtype == torch.bfloat16 and tuple(t.shape) in shapes for t in tensors)
    engine.backward(loss)
    return waiting


@pytest.mark.parametrize("script", [False, True])
def test_zero3_keeps_no_rounded_weight_until_backward(script: bool) -> None:
    assert worlds.run(rounded_weights, 3, script) == [0, 0]


def test_what_it_cannot_do_is_said() -> None:
    with pytest.raises(ConfigError, match=r"torch_autocast\.dtype: .*must be bf16 or fp16"):
        load_config(config(1, "float32"), world_size=1)
    asked = config(1, "bfloat16")
    asked["torch_autocast"]["lower_precision_safe_modules"] = ["torch.nn.Linear"]
    with pytest.warns(ConfigWarning, match=r"torch_autocast.lower_precision_safe_modules = .*communication_data_type"):
        load_config(asked, world_size=1)


def piped() -> None:
    model = deepspeed.PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=nn.MSELoss())
    with pytest.raises(NotImplementedError, match=r"torch_autocast.enabled: not with a pipeline"):
        deepspeed.initialize(model=model, config=config(1, "bf16"))


def test_not_in_a_pipeline() -> None:
    worlds.run(piped, ranks=1)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_loss_that_does_not_go_through_the_engine(enabled: bool) -> None:
    """As ArcticTraining computes it."""
    engine, *_ = deepspeed.initialize(model=Net(), config=config(2, "bfloat16", torch_autocast={"enabled": enabled}))
    with autocast_if_enabled(engine):
        engine.module(rows(0, 0))
    assert engine.module.seen == [torch.bfloat16 if enabled else torch.float32]
