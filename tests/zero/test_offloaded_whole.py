"""LAMB and Muon in the host's memory: all parts in one step, so the bits are those without a home."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from training import Job, adamw, differing, lamb, muon, oracle, train
from worlds import run

from refimpl.launch import RankError
from refimpl.offload.blocks import OffloadError
from refimpl.offload.homes import Disk, Host
from refimpl.optim.loss_scale import DynamicLossScaler
from refimpl.zero.config import ZeroConfig
from refimpl.zero.zero1 import Zero1

OPTIMIZERS = {"lamb": lamb, "muon": muon}
every_optimizer = pytest.mark.parametrize("name", list(OPTIMIZERS))


def at_home(job: Job, **config: Any) -> Job:
    return replace(job, config={**job.config, "optimizer_home": Host(), **config})


@every_optimizer
@pytest.mark.parametrize(
    ("stage", "ranks", "config"),
    [
        ("zero1", 1, {}),
        ("zero1", 2, {"offload_ratio": 0.4}),
        ("zero2", 3, {"gradient_home": Host()}),
        ("zero3", 3, {"parameter_home": Host(), "sub_group_size": 64}),
        ("zero3", 4, {"gradient_home": Host(), "offload_ratio": 0.4}),
    ],
)
def test_the_bits_of_one_process(name: str, stage: str, ranks: int, config: dict[str, Any]) -> None:
    """Also where a part of the elements stays, and where parts would have been cut through parameters."""
    job = Job(optimizer=OPTIMIZERS[name])
    assert differing(run(train, stage, at_home(job, **config), ranks=ranks)[0].weights, oracle(ranks, job)) == []


@every_optimizer
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_fp16_equals_the_same_stage_without_it(name: str, stage: str) -> None:
    """With an overflow, clipping, and two micro-batches."""
    job = Job(
        optimizer=OPTIMIZERS[name], dtype=torch.float16, clip=0.05, poison=(2, 1), micro_batches=2,
        scaler=lambda: DynamicLossScaler(256.0),
    )  # fmt: skip
    plain, there = run(train, stage, job, ranks=3)[0], run(train, stage, at_home(job), ranks=3)[0]
    assert plain.weights is not None
    assert there.done == plain.done == [True, True, False, True, True]
    assert differing(there.weights, plain.weights) == []


@pytest.mark.parametrize(("make", "ratio"), [(lamb, 1.0), (muon, 0.4), (adamw, 0.4)])
def test_half_a_step_is_of_no_use(make: Callable[[nn.Module], optim.Optimizer], ratio: float) -> None:
    """Also where what has stayed in memory is updated first; else masters that have moved would follow the weights."""

    def raises(*_: Any) -> None:
        raise KeyError("of the script's own")

    def half() -> None:
        model = nn.Linear(4, 4)
        stage = Zero1(model, make(model), config=ZeroConfig(optimizer_home=Host(), offload_ratio=ratio))
        stage.optimizer.register_step_post_hook(raises)
        stage.backward(model(torch.ones(1, 4)).sum())
        with pytest.raises(KeyError):
            stage.step()
        with pytest.raises(OffloadError, match=r"interrupted in the middle .* Load a checkpoint"):
            stage.full_state_dict()

    run(half)


@every_optimizer
def test_what_cannot_bring_all_of_it_together_is_refused(name: str, tmp_path: Path) -> None:
    def build(**config: Any) -> None:
        model = nn.Linear(4, 4)
        Zero1(model, OPTIMIZERS[name](model), config=ZeroConfig(**config))

    with pytest.raises(RankError, match=r"whole parameters, and a disk brings parts: .*optimizer_home=Host\(\)"):
        run(lambda: build(optimizer_home=Disk(tmp_path)))
    with pytest.raises(RankError, match="sends in its step, which cannot be late: leave delayed_update out"):
        run(lambda: build(optimizer_home=Host(), delayed_update=True))
