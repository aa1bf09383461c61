"""What scripts and libraries ask of an engine under DeepSpeed's names, and its weights going out and coming in."""

from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from test_engine import STAGES, Net, batch, close, config, oracle
from torch import Tensor, nn

import refimpl
from refimpl.deepspeed.utils import safe_get_full_fp32_param
from refimpl.launch import RankError


class Speaker(Net):
    """A model with something to say for itself."""

    greeting = "hello"

    def generate(self, n: int) -> list[int]:
        return list(range(n))


def test_unknown_attributes_are_the_models() -> None:
    engine, *_ = refimpl.initialize(model=Speaker(), config=config(0))
    assert engine.generate(3) == [0, 1, 2]
    assert engine.greeting == "hello"
    assert engine.up is engine.module.up
    assert not hasattr(engine, "sing")
    with pytest.raises(AttributeError, match=r"Engine has no attribute 'sing', nor has its Speaker"):
        engine.sing()


def test_the_models_configuration_may_stand_in_the_place_of_the_engines() -> None:
    """h2o-llmstudio: `engine.config = engine.module.config`; DeepSpeed trains by its `_config`."""
    engine, *_ = refimpl.initialize(model=Net(), config=config(1))
    assert engine.config.zero_optimization.stage == engine._config.zero_optimization.stage == 1
    engine.config = {"use_cache": False}
    engine.backward(engine(batch(0, 0, 0)))
    engine.step()
    assert (engine.config, engine.zero_optimization_stage()) == ({"use_cache": False}, 1)


def test_backward_averages_whatever_is_set() -> None:
    engine, *_ = refimpl.initialize(model=Net(), config=config(0))
    engine.enable_backward_allreduce = True
    with pytest.raises(NotImplementedError, match=r"enable_backward_allreduce = False: .*no_sync\(\)"):
        engine.enable_backward_allreduce = False
    assert engine.enable_backward_allreduce


def test_the_questions() -> None:
    settings = config(
        2,
        gradient_accumulation_steps=3,
        gradient_clipping=0.5,
        fp16={"enabled": True, "loss_scale": 0, "initial_scale_power": 4},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
    )
    engine, optimizer, *_ = refimpl.initialize(model=Net(), config=settings)
    assert (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.fp16_auto_cast()) == (True, False, False)
    assert (engine.dynamic_loss_scale(), engine.loss_scale(), engine.gradient_clipping()) == (True, 0, 0.5)
    assert engine.get_data_types() == (torch.float16, torch.float16)
    assert engine.get_batch_info() == (12, 4, 3)
    assert (engine.zero_optimization(), engine.zero_optimization_stage()) == (True, 2)
    assert engine.zero_optimization_partition_gradients()
    assert not engine.zero_optimization_partition_weights()
    assert not engine.zero_gather_16bit_weights_on_model_save()
    assert engine.zero_ignore_unused_parameters()
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("SGD", "WarmupLR")
    assert (engine.world_size, engine.dp_world_size, engine.mp_world_size, engine.global_rank) == (1, 1, 1, 0)
    assert (optimizer.loss_scale, optimizer.cur_scale, optimizer.dynamic_loss_scale) == (16, 16, True)
    assert optimizer.needs_scaler()
    assert optimizer.overflow is False
    assert engine.config.get("zero_optimization", {}).get("stage") == 2
    assert engine.config.get("nonsense", 7) == 7
    fp32, plain, *_ = refimpl.initialize(model=Net(), config=config(0))
    assert (plain.loss_scale, plain.dynamic_loss_scale, fp32.fp16_enabled()) == (1.0, False, False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_that_a_script_loads_are_what_is_stepped(stage: int) -> None:
    """GLM, after `module.load_state_dict`: DeepSpeed's fp32 weights stay as they were without that call."""
    settings = config(stage, fp16={"enabled": True, "loss_scale": 1})
    engine, optimizer, *_ = refimpl.initialize(model=Net().half(), config=settings)
    engine.module.load_state_dict({name: torch.ones_like(w) for name, w in Net().state_dict().items()})
    optimizer.refresh_fp32_params()
    optimizer.param_groups[0]["lr"] = 0.0
    engine.backward(engine(batch(0, 0, 0).half()))
    engine.step()
    stepped = [safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    assert all(w is not None and torch.equal(w, torch.ones_like(w)) for w in stepped)


def loaded() -> list[int]:
    """What a rank gets of 12 samples, shuffled and as many at a time as in training; in their order, by 3."""
    engine, *_ = refimpl.initialize(model=Net(), config=config(1), collate_fn=tuple)
    with pytest.raises(NotImplementedError, match="deepspeed_io: data_sampler"):
        engine.deepspeed_io(range(12), data_sampler=object())
    loaders = engine.deepspeed_io(range(12)), engine.deepspeed_io(range(12), batch_size=3, route="eval")
    every = [[int(i) for batch in loader for i in batch] for loader in loaders]
    assert every[1] == list(range(engine.group.rank, 12, 2))
    assert every[0] != every[1]
    assert [(type(batch), len(batch)) for batch in loaders[1]] == [(tuple, 3), (tuple, 3)]
    return every[0]


def test_another_data_set_is_shared_out_too() -> None:
    first, second = worlds.run(loaded, ranks=2)
    assert sorted(first + second) == list(range(12))


def overflows() -> tuple[list[bool], list[bool], float]:
    settings = config(1, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    engine, optimizer, *_ = refimpl.initialize(model=Net(), config=settings)
    seen, norms = [], []
    for factor in (float("inf"), 3e3, 1.0):  # a norm of NaN, one of inf
        engine.backward(engine(batch(0, 0, 0).half()) * (factor if engine.group.rank else 1.0))
        engine.step()
        seen.append(optimizer.overflow)
        norms.append(bool(engine.get_global_grad_norm() == optimizer._global_grad_norm == 0))
    return seen, norms, optimizer.cur_scale


def test_the_optimizer_tells_of_an_overflow() -> None:
    """And its norm is 0 until a step is taken, as in DeepSpeed."""
    assert worlds.run(overflows, ranks=2) == [([True, True, False], [True, True, False], 4.0)] * 2


def counted_by_the_client(stage: int) -> dict[str, Tensor]:
    """KOSMOS-2's and other fairseq's loop: it says when a batch is full, and what its losses are divided by."""
    engine, *_ = refimpl.initialize(model=Net(), config=config(stage, gradient_accumulation_steps=2))
    engine.scale_wrt_gas = False
    for step in range(2):
        for micro in range(2):
            engine.set_gradient_accumulation_boundary(is_boundary=False)
            engine.backward(engine(batch(engine.group.rank, step, micro)))
            engine.micro_steps += micro == 0
            engine.set_gradient_accumulation_boundary(is_boundary=True)
            engine.allreduce_gradients()
        engine.step()
    return engine.module_state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_may_count_and_divide_for_itself(stage: int) -> None:
    for weights in worlds.run(counted_by_the_client, stage, ranks=2):
        close(weights, oracle(2, steps=2, micros=2, divide=1)["weights"])


def test_the_clients_scaler_says_the_scale() -> None:
    settings = config(1, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    engine, optimizer, *_ = refimpl.initialize(model=Net(), config=settings)
    assert optimizer.external_loss_scale is None
    for factor, scale in ((1.0, 8.0), (float("inf"), 8.0), (1.0, 2.0)):
        optimizer.override_loss_scale(scale)
        engine.backward(engine(batch(0, 0, 0).half()) * factor)
        engine.step()
        assert optimizer.overflow is (factor != 1.0)
        assert optimizer.external_loss_scale == optimizer.cur_scale == scale  # of its own it would have come down
    assert engine.skipped_steps == 1


def resized(stage: int) -> tuple[Any, tuple[int, ...]]:
    engine, *_ = refimpl.initialize(model=Net(), config=config(stage))
    engine.set_train_batch_size(24)  # 4 x 3 micro-batches x 2 ranks
    for micro in range(3):
        engine.backward(engine(batch(engine.group.rank, 0, micro)))
        engine.step()
    with pytest.raises(ValueError, match=r"4 x world size 2 = 8"):
        engine.set_train_batch_size(25)
    with pytest.raises(TypeError, match=r"gradient_accumulation_steps = 2: .*set_train_batch_size"):
        engine._config.gradient_accumulation_steps = 2
    with pytest.raises(TypeError, match="train_batch_size = 16"):
        engine.config["train_batch_size"] = 16
    engine.set_train_micro_batch_size(5)
    return engine.stage.full_state_dict(), (*engine.get_batch_info(), engine.global_steps)


@pytest.mark.parametrize("stage", STAGES)
def test_the_batch_may_change(stage: int) -> None:
    results = worlds.run(resized, stage, ranks=2)
    close(results[0][0], oracle(2, steps=1, micros=3, divide=3)["weights"])
    assert results[1][1] == (30, 5, 3, 1)


def by_hand(src: dict[str, Tensor], dst: nn.Module) -> None:
    for name, p in dst.named_parameters():
        p.data.copy_(src[name])


def weights_travel(stage: int, extra: dict[str, Any]) -> None:
    engine, *_ = refimpl.initialize(model=Net(), config=config(stage, **extra))
    engine.module.down.bias.requires_grad_(False)
    start = {name: w.clone() for name, w in engine.module_state_dict().items()}
    assert start["up.weight"].isfinite().all()
    without = engine.module_state_dict(exclude_frozen_parameters=True)
    assert start.keys() - without.keys() == {"down.bias"}
    other = {name: w * 2 for name, w in start.items()}
    engine.load_module_state_dict(other)
    x = batch(0, 0, 0).to(start["up.weight"].dtype)
    engine.backward(engine(x) * 0)  # a step with a zero gradient must not bring the old weights back
    engine.step()
    for name, w in engine.module_state_dict().items():
        torch.testing.assert_close(w, other[name])
    engine.load_module_state_dict({"module": start}, strict=False)
    for name, w in engine.module_state_dict().items():
        torch.testing.assert_close(w, start[name])
    engine.load_module_state_dict(other, custom_load_fn=by_hand)
    for name, w in engine.module_state_dict().items():
        torch.testing.assert_close(w, other[name])
    engine.load_module_state_dict(start, custom_load_fn=lambda src, dst: dst.load_state_dict(src))
    for name, w in engine.module_state_dict().items():
        torch.testing.assert_close(w, start[name])
    given = {name: w * 2 for name, w in start.items() if name != "up.weight"}
    engine.load_module_state_dict(given, fetch_z3_params=True, allowed_missing_keys=["up.weight", "down.bias"])
    for name, w in engine.module_state_dict().items():
        torch.testing.assert_close(w, given.get(name, start[name]))
    for wrong, allowed in ((given, ["down.bias"]), (given | {"more": given["down.bias"]}, ["up.weight"])):
        with pytest.raises(RuntimeError, match=r"missing: \['up.weight'\]|not the model's: \['more'\]"):
            engine.load_module_state_dict(wrong, allowed_missing_keys=allowed)
    engine.load_module_state_dict(start)
    whole = engine._zero3_consolidated_16bit_state_dict()
    assert whole.keys() == (start.keys() if engine.group.rank == 0 else set())
    assert all(w.equal(start[name]) for name, w in whole.items())


@pytest.mark.parametrize("extra", [{}, {"bf16": {"enabled": True}}])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_go_out_and_come_in_whole(stage: int, extra: dict[str, Any]) -> None:
    worlds.run(weights_travel, stage, extra, ranks=2)


def saved_by_the_first(stage: int, folder: str) -> dict[str, Any] | None:
    """As SwissArmyTransformer saves: rank 0 alone, by two methods of DeepSpeed's engine. What the file holds."""
    engine, *_ = refimpl.initialize(model=Net(), config=config(stage))
    if engine.group.rank > 0:
        return None
    assert engine._create_checkpoint_file(folder, "7", False)
    engine._save_checkpoint(folder, "7", client_state={"iteration": 7})
    found: dict[str, Any] = torch.load(f"{folder}/7/mp_rank_00_model_states.pt")
    assert all(w.equal(found["module"][name]) for name, w in engine.module_state_dict().items())
    return found


@pytest.mark.parametrize("stage", [0, 2])
def test_one_rank_saves_its_model_alone(stage: int, tmp_path: Path) -> None:
    found = worlds.run(saved_by_the_first, stage, str(tmp_path), ranks=2)[0]
    assert found is not None
    assert found["iteration"] == 7
    assert found["module"].keys() == Net().state_dict().keys()


def test_no_rank_has_a_model_in_shards(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="no rank has the weights here; call save_checkpoint on every rank"):
        worlds.run(saved_by_the_first, 3, str(tmp_path), ranks=2)


def again(stage: int) -> tuple[dict[str, Tensor] | None, int]:
    model, optimizer = Net(), None
    for step in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = refimpl.initialize(model=model, optimizer=optimizer, config=config(stage, optimizer=None))
        engine.backward(engine(batch(engine.group.rank, step, 0)))
        engine.step()
        engine.empty_partition_cache()
        state = engine.stage.full_state_dict()
        state = state and {name: w.clone() for name, w in state.items()}
        engine.destroy()
    assert type(optimizer) is torch.optim.SGD
    assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}
    return state, engine.group.rank


@pytest.mark.parametrize("stage", STAGES)
def test_a_destroyed_engine_gives_the_model_back(stage: int) -> None:
    results = worlds.run(again, stage, ranks=2)
    close(results[0][0], oracle(2, steps=2, micros=1)["weights"])


def infers(stage: int) -> tuple[float, object]:
    settings = {k: v for k, v in config(stage).items() if k != "optimizer"}
    engine, optimizer, *_ = refimpl.initialize(model=Net(), config=settings)
    engine.eval()
    with torch.no_grad():
        loss = engine(batch(0, 0, 0)).item()
    with pytest.raises(RuntimeError, match="no optimizer"):
        engine.step()
    return loss, optimizer


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_without_an_optimizer_infers(stage: int) -> None:
    expected = Net()(batch(0, 0, 0)).item()
    for loss, optimizer in worlds.run(infers, stage, ranks=2):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert optimizer is None


def test_arguments_for_the_schedule() -> None:
    class Told:
        given: dict[str, Any]

        def step(self, **given: Any) -> None:
            self.given = given

    schedule = Told()
    engine, *_ = refimpl.initialize(model=Net(), config=config(0), lr_scheduler=schedule)
    engine.backward(engine(batch(0, 0, 0)))
    engine.step(lr_kwargs={"epoch": 3})
    assert schedule.given == {"epoch": 3}
