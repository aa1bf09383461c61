"""One model, several engines after each other, as Lightning's Trainer makes them: fit, test, fit again."""

from collections import OrderedDict
from unittest import mock

import pytest
import torch
import worlds
from torch import Tensor, nn

import refimpl.deepspeed as deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}},
}


def engine_of(model: nn.Module, stage: int, trains: bool) -> deepspeed.DeepSpeedEngine:
    config = dict(CONFIG) if trains else {"train_micro_batch_size_per_gpu": 2}
    config["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 10}
    return deepspeed.initialize(model=model, config=config, model_parameters=None if trains else [])[0]


def trained(engine: deepspeed.DeepSpeedEngine, steps: range) -> None:
    for step in steps:
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + engine.global_rank))
        engine.backward(engine(x).square().mean())
        engine.step()


def fit_test_fit(stage: int, at_once: bool) -> list[Tensor]:
    """The weights; between two fits the model is tried out, or the second one begins with whole weights of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    first = engine_of(model, stage, trains=True)
    trained(first, range(2))
    if at_once:
        first.stage.release()
        return [*trained_again(model, stage), torch.zeros(3)]
    for module in model.modules():  # as Lightning does, before it makes an engine that does not train
        module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
        module._backward_hooks = OrderedDict()
    tested = engine_of(model, stage * (stage == 3), trains=False).eval()
    with torch.no_grad():
        shown = tested(torch.ones(2, 5))
    with pytest.raises(RuntimeError, match="that was released"):
        first.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())), torch.no_grad():
        same = model(torch.ones(2, 5)) - shown
    return [*trained_again(model, stage), same[0]]


def trained_again(model: nn.Module, stage: int) -> list[Tensor]:
    engine = engine_of(model, stage, trains=True)
    trained(engine, range(2, 4))
    return [w.clone() for w in engine.module.state_dict().values()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_goes_from_one_engine_to_the_next(stage: int, ranks: int) -> None:
    mine, theirs = (worlds.run(fit_test_fit, stage, at_once, ranks=ranks) for at_once in (False, True))
    for got, wanted in zip(mine, theirs, strict=True):
        assert all(map(torch.equal, got, wanted))


def two_models() -> None:
    body = nn.Linear(4, 4)
    held = deepspeed.initialize(model=nn.Sequential(body, nn.Linear(4, 2)), config=CONFIG)[0]
    with pytest.raises(ValueError, match=r"belongs to a DDP already"):
        deepspeed.initialize(model=body, config=CONFIG)
    held.destroy()


def test_a_part_of_anothers_model_is_refused() -> None:
    worlds.run(two_models, ranks=2)


def calls_of_init_distributed() -> int:
    with mock.patch("refimpl.deepspeed.init_distributed", wraps=deepspeed.init_distributed) as watched:
        deepspeed.init_distributed()
        engine_of(nn.Linear(5, 3), 2, trains=True)
    return watched.call_count


def test_who_watches_init_distributed_sees_the_scripts_calls_alone() -> None:
    """Lightning's tests count them; DeepSpeed's `initialize` calls that of `deepspeed.comm`."""
    assert worlds.run(calls_of_init_distributed, ranks=1) == [1]
