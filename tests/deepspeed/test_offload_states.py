"""States at the host for a while: what is refused meanwhile, what is not, and that nothing changes by it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from saving import SIZE, same, settings, start, train, weights

import refimpl
from refimpl.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from refimpl.deepspeed.runtime.zero.offload_states import get_state_devices
from refimpl.zero.init import GatheredParameters
from refimpl.zero.loop.parked import CLASSES

AWAY = r": at the host since offload_states\(\); call reload_states\(\) first"
TRAINING = ["optim_states", "hp_params", "contiguous_grad_buffer"]  # what a trainer of RLHF sends away to generate


def config(stage: int, bf16: bool = True) -> dict[str, Any]:
    return settings(stage, bf16={"enabled": bf16})


def there_and_back(stage: int, include: list[str] | None, bf16: bool) -> bool:
    """Whether four steps give the same losses with all at the host between each two, and before one step."""
    plain, other = (start(config(stage, bf16)) for _ in range(2))
    expected, found = train(plain, range(4)), []
    for step in range(4):
        found += train(other, range(step, step + 1))
        other.offload_states(include=include)
        other.reload_states()
    for engine in (plain, other):
        engine.backward(engine(torch.ones(4, SIZE, dtype=engine.config.dtype)))
        if engine is other:
            engine.optimizer.offload_states(include=include, device=OffloadDeviceEnum.cpu, non_blocking=True)
            engine.optimizer.reload_states(non_blocking=True)
        engine.step()
    return found == expected and same(weights(plain), weights(other))


@pytest.mark.parametrize("include", [None, [OffloadStateTypeEnum.lp_grads], TRAINING])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 3), (2, 2), (3, 3)])
def test_nothing_changes(stage: int, ranks: int, bf16: bool, include: list[str] | None) -> None:
    assert all(worlds.run(there_and_back, stage, include, bf16, ranks=ranks))


def refused_meanwhile(stage: int, folder: Path) -> None:
    engine = start(config(stage))
    train(engine, range(1))
    engine.save_checkpoint(folder, "a")
    x = torch.zeros(4, SIZE, dtype=torch.bfloat16)
    name = next(iter(engine.stage.names.values()))
    engine.offload_states(include=TRAINING)
    engine.offload_states(include=["optim_states"])
    assert (len(weights(engine)) > 0) == (engine.group.rank == 0)  # to be sent to whoever generates
    with torch.no_grad():
        engine(x)
    for use in (
        lambda: engine.save_checkpoint(folder),
        lambda: engine.load_checkpoint(folder, "a"),
        lambda: engine.stage.full_parameter(name),
        lambda: engine.stage.full_state(name, "exp_avg"),
        lambda: engine.backward(engine(x)),
    ):
        with pytest.raises(RuntimeError, match=AWAY):
            use()
    engine.reload_states()
    engine.zero_grad()
    with pytest.raises(ValueError, match="include has 'optimizer_states'; known: optim_states, hp_params"):
        engine.offload_states(include=["optimizer_states"])
    engine.offload_states(include=["optim_states"])
    engine.backward(engine(x))
    with pytest.raises(RuntimeError, match="optim_states" + AWAY):
        engine.step()
    engine.reload_states()
    engine.step()
    engine.offload_states()
    for use in (lambda: engine(x), lambda: weights(engine)):
        with pytest.raises(RuntimeError, match="lp_params" + AWAY):
            use()
    engine.reload_states()
    train(engine, range(1))
    engine.offload_states()
    engine.destroy()  # brings them back


def gathered_meanwhile() -> None:
    """Past the model: its own forward would refuse, but a layer by itself and a block of whole parameters gather."""
    engine = start(config(3))
    train(engine, range(1))
    engine.offload_states()
    inner, x = engine.module, torch.zeros(4, SIZE, dtype=torch.bfloat16)
    for use in (
        lambda: inner.into(x),
        lambda: inner.frozen(x),
        lambda: GatheredParameters(inner.into.weight).__enter__(),
    ):
        with pytest.raises(RuntimeError, match="lp_params" + AWAY):
            use()
    engine.reload_states()
    assert inner.into(x).isfinite().all()
    train(engine, range(1, 2))


def test_a_layer_by_itself_does_not_gather_what_is_away() -> None:
    worlds.run(gathered_meanwhile)


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 2), (3, 3)])
def test_what_needs_a_state_that_is_away_is_told(stage: int, ranks: int, tmp_path: Path) -> None:
    worlds.run(refused_meanwhile, stage, tmp_path, ranks=ranks)


def test_what_cannot_be_sent_is_named() -> None:
    engine = start(config(1))
    with pytest.raises(ValueError, match=r"include has 'optimizer'; known: optim_states, hp_params"):
        engine.offload_states(include=["optimizer"])
    with pytest.raises(ValueError, match="device='nvme': cpu is the one"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    with pytest.warns(UserWarning, match="device='none': nothing is sent"):
        engine.offload_states(device=OffloadDeviceEnum.none)
    engine.offload_states(include=[])
    assert engine.stage.parked.away == {}
    train(engine, range(1))
    assert set(OffloadStateTypeEnum) == CLASSES.keys()
    engine.offload_states()
    assert get_state_devices(engine, OffloadStateTypeEnum.contiguous_grad_buffer) == set()
    assert get_state_devices(engine, OffloadStateTypeEnum.hp_params) == {torch.device("cpu")}
    assert isinstance(engine, refimpl.Engine)
