"""What the JSON asks of gradients, weights and their update, on a device that is not the CPU: the bits of the CPU."""

from typing import Any

import pytest
import torch
import worlds
from torch import Tensor, nn

import refimpl
from refimpl import launch

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}


def by(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 0.01, **params}}}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return ADAM | {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more}}


def sent_as(kind: str, stage: int, **more: Any) -> dict[str, Any]:
    return zero(stage) | {"gradient_compression": {"type": kind, **more}}


QUANTISED = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
WAYS: dict[str, dict[str, Any]] = {
    "1-bit Adam": by("OneBitAdam", freeze_step=1),
    "0/1 Adam": by("ZeroOneAdam", var_freeze_step=1, var_update_scaler=1, local_step_scaler=1, local_step_clipper=4),
    "1-bit LAMB": by("OneBitLamb", freeze_step=1),
    "LAMB, ZeRO-1": zero(1) | by("Lamb"),
    "Lion, ZeRO-3": zero(3) | by("Lion"),
    "Muon, ZeRO-2": zero(2) | by("Muon"),
    "top-k": sent_as("topk", 0, ratio=0.1),
    "random k, ZeRO-1": sent_as("randomk", 1, ratio=0.1),
    "int4": sent_as("int4", 0),
    "int8, ZeRO-1": sent_as("int8", 1),
    "sign, ZeRO-1": sent_as("sign", 1),
    "PowerSGD": sent_as("powersgd", 0, rank=2),
    "ZeRO++": zero(3, **QUANTISED),
    "LoCo": zero(3, **QUANTISED, zeropp_loco_param={"err_beta": 0.5}),
    "MiCS": zero(3, mics_shard_size=1),
    "fp16 that overflows, ZeRO-3": zero(3) | {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}},
    "gradients on the wire in bf16": zero(1) | {"communication_data_type": "bfp16"},
    "gradients kept in fp32": zero(2) | {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
}


def trained(asked: dict[str, Any]) -> list[Tensor]:
    """Weights, then the norm and the scale of five steps of two micro-batches; weights are loaded before the second."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 7))
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    engine = refimpl.initialize(model=model, config=config | asked)[0]
    draw, scales = torch.Generator().manual_seed(engine.group.rank), []
    for step in range(5):
        if step == 1:
            engine.module.load_state_dict(engine.module.state_dict())
        for _ in range(2):
            batch = torch.randn(4, 33, generator=draw).to(engine.device, engine.config.dtype)
            engine.backward(engine(batch).float().square().mean())
            engine.step()
        scales.append(float(engine.get_global_grad_norm() or 0))
    engine.stage.catch_up()
    return [engine.stage.full_parameter(name).cpu() for name in engine.stage.names.values()] + [torch.tensor(scales)]


def each() -> dict[str, list[Tensor]]:
    return {name: trained(asked) for name, asked in WAYS.items()}


@pytest.mark.xdist_group("pretend")  # so that it is built once
def test_every_way_to_train_gives_the_bits_of_the_cpu(ranks: launch.World) -> None:
    here, there = worlds.run(each, ranks=2)[0], ranks.call(each)[0]
    assert [name for name in WAYS if not all(map(torch.equal, here[name], there[name]))] == []
