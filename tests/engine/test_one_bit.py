"""LAMB and the 1-bit optimizers by DeepSpeed's JSON: trained, saved, resumed, and refused where they cannot be."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from saving import settings, start, train, weights
from torch import nn

import refimpl
from refimpl.deepspeed.pipe import PipelineModule
from refimpl.engine.config import load_config
from refimpl.engine.configuration.keys import ConfigError, ConfigWarning
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.optim.one_bit_adam import OneBitAdam

PARAMS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 1},
    "ZeroOneAdam": {"var_freeze_step": 1, "var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 4},
    "OneBitLamb": {"freeze_step": 1, "coeff_beta": 0.5, "factor_max": 2.0, "factor_min": 0.9, "factor_threshold": 0.2},
    "Lamb": {"max_coeff": 0.3, "min_coeff": 0.01, "eps_inside_sqrt": True, "bias_correction": False},
}


def asked(name: str, **more: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 0.01, **PARAMS[name], **more}}}


def owed(engine: Any) -> dict[str, torch.Tensor]:
    """What compression has not sent yet on this rank; LAMB compresses nothing."""
    return {} if engine.stage.owing is None else engine.stage.owing.state_dict()["errors"]


def stop_and_go_on(config: dict[str, Any], folder: Path) -> None:
    """As test_engine_checkpoint's, with the errors of compression."""
    engine = start(config)
    train(engine, range(3))
    engine.save_checkpoint(folder)
    errors = {k: t.clone() for k, t in owed(engine).items()}
    expected = train(engine, range(3, 6)), weights(engine)
    again = start(config, seed=7)
    again.load_checkpoint(folder)
    assert errors.keys() == owed(again).keys()
    assert all(torch.equal(errors[k], t) for k, t in owed(again).items())
    assert (train(again, range(3, 6)), True) == (expected[0], True)
    end = weights(again)
    assert all(torch.equal(end[name], expected[1][name]) for name in end)


@pytest.mark.parametrize(("name", "ranks"), [("OneBitAdam", 3), ("ZeroOneAdam", 2), ("OneBitLamb", 2), ("Lamb", 3)])
def test_going_on_gives_the_same_bits(name: str, ranks: int, tmp_path: Path) -> None:
    worlds.run(stop_and_go_on, settings(3 if name == "Lamb" else 0, **asked(name)), tmp_path, ranks=ranks)


def test_fp16_with_a_loss_scale(tmp_path: Path) -> None:
    config = settings(0, fp16={"enabled": True, "initial_scale_power": 20}, **asked("OneBitAdam"))
    worlds.run(stop_and_go_on, config, tmp_path)


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_on_another_number_of_ranks_the_errors_begin_at_zero(name: str, tmp_path: Path) -> None:
    config = settings(0, **asked(name))

    def save() -> None:
        engine = start(config)
        train(engine, range(3))
        engine.save_checkpoint(tmp_path)

    def load() -> None:
        engine = start(config, seed=7)
        if engine.group.rank == 0:
            with pytest.warns(
                UserWarning,
                match=f"{name}: the saved errors are of 2 ranks, here are 3: error feedback begins at zero",
            ):
                engine.load_checkpoint(tmp_path)
        else:
            engine.load_checkpoint(tmp_path)
        assert engine.optimizer.taken == 3  # type: ignore[union-attr]
        assert not any(t.any() for t in owed(engine).values())
        assert all(torch.isfinite(torch.tensor(train(engine, range(3, 5)))))

    worlds.run(save)
    worlds.run(load, ranks=3)


def test_a_mask_is_the_runs_own(tmp_path: Path) -> None:
    """As DeepSpeed's test_onebit.py wants it: neither saved nor loaded."""

    def go() -> None:
        for row in (0, 1):
            model = nn.Linear(10, 10)
            mask = torch.zeros(10, 10)
            mask[row] = 1
            groups = [{"params": [model.weight], "exp_avg_mask": mask.view(-1)}, {"params": [model.bias]}]
            config = {"train_batch_size": 2, **asked("OneBitAdam")}
            engine, optimizer, *_ = refimpl.initialize(model=model, model_parameters=groups, config=config)
            if row:
                engine.load_checkpoint(tmp_path)
            for _ in range(3):
                engine.backward(engine(torch.ones(1, 10)).square().mean())
                engine.step()
            assert torch.equal(optimizer.param_groups[0]["exp_avg_mask"], mask.view(-1))
            momentum = engine.stage.full_state(model.weight, "exp_avg")
            assert momentum is not None
            assert torch.equal(momentum != 0, mask.bool())
            if not row:
                engine.save_checkpoint(tmp_path)

    worlds.run(go)


def test_stages_of_a_pipeline_average_each_their_own() -> None:
    def go() -> float:
        torch.manual_seed(0)
        layers = [nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)]
        model = PipelineModule(layers, 2, loss_fn=nn.functional.mse_loss)
        config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, **asked("OneBitAdam")}
        engine = refimpl.initialize(model=model, config=config)[0]
        x = torch.randn(2, 16, generator=torch.Generator().manual_seed(engine.group.rank))
        losses = [float(engine.train_batch(iter([(x, x[:, :1])] * 2))) for _ in range(6)]
        mine = torch.cat([p.detach().view(-1) for p in engine.module.parameters()])
        assert all(torch.equal(mine, other) for other in engine.group.all_gather_object(mine))
        assert engine.group.ledger.sent_bytes("tag")["momentum"] > 0
        assert losses[-1] < losses[0]
        return losses[-1]

    assert len(set(worlds.run(go, ranks=4))) == 1


def load(config: dict[str, Any]) -> Any:
    return load_config({"train_batch_size": 2, **config}, world_size=2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_that_shard_are_refused(stage: int) -> None:
    with pytest.raises(ConfigError, match=rf"'ZeroOneAdam'.*zero_optimization.stage must be 0, not {stage}"):
        load({"zero_optimization": {"stage": stage}, **asked("ZeroOneAdam")})


@pytest.mark.parametrize(
    ("name", "bad", "says"),
    [
        ("OneBitAdam", {"freeze_step": 0}, "optimizer.params.freeze_step = 0: must be at least 1"),
        ("OneBitAdam", {"freeze_step": 1.5}, "optimizer.params.freeze_step = 1.5: must be a whole number"),
        ("OneBitAdam", {"comm_backend_name": "smoke"}, "optimizer.params.comm_backend_name = 'smoke': must be one of"),
        ("OneBitLamb", {"coeff_beta": 1}, "optimizer.params.coeff_beta = 1: must be below 1"),
        ("ZeroOneAdam", {"freeze_step": 5}, "ZeroOneAdam has no such parameter; did you mean var_freeze_step?"),
        ("Lamb", {"max_coef": 1}, "Lamb has no such parameter; did you mean max_coeff?"),
    ],
)
def test_wrong_parameters_are_named(name: str, bad: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(asked(name, **bad))


def test_what_has_no_effect_is_said() -> None:
    with pytest.warns(ConfigWarning, match=r"optimizer.params.cuda_aware = True: there is no MPI here"):
        load(asked("OneBitAdam", cuda_aware=True, comm_backend_name="nccl"))
    load(asked("OneBitAdam", cuda_aware=False, comm_backend_name="nccl"))


def test_tensor_ranks_have_parts_and_copies() -> None:
    def go() -> None:
        model = GPT(GPTConfig(vocab=19, context=8, width=64, layers=1, heads=2))
        for kind, why in {"Lamb": "parts of", "OneBitLamb": "parts of", "OneBitAdam": "copies that"}.items():
            config = {"train_batch_size": 1, "tensor_parallel": {"autotp_size": 2}, **asked(kind)}
            with pytest.raises(ConfigError, match=rf"optimizer\.type {kind}: tensor ranks have {why}"):
                refimpl.initialize(model=copy.deepcopy(model), config=config)

    worlds.run(go)


def test_deepspeeds_import_paths() -> None:
    from refimpl.deepspeed.ops.lamb import FusedLamb
    from refimpl.deepspeed.runtime.fp16.onebit.adam import OnebitAdam
    from refimpl.deepspeed.runtime.fp16.onebit.lamb import OnebitLamb
    from refimpl.deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam

    p = nn.Parameter(torch.ones(2))
    for kind in (OnebitAdam, OnebitLamb, ZeroOneAdam):
        assert kind([p], None, 0.5, betas=(0.8, 0.9)).param_groups[0]["lr"] == 0.5
        with pytest.raises(ValueError, match="set gradient_clipping"):
            kind([p], max_grad_norm=1.0)
    assert issubclass(OnebitAdam, OneBitAdam)
    assert FusedLamb([p], 0.5).param_groups[0]["max_coeff"] == 10.0
