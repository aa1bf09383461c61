"""Stacked experts that were dealt out by hand, before there was an engine: what is saved, and how a run goes on.

What only this shows: the file has the bits of `whole_state_dict`, and a run that goes on from a checkpoint, at the same
ep or with all experts on each rank, has the losses of the run that never stopped, bit for bit. Dealt out by the JSON,
and beside one process, they are in `test_experts_strangers.py`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import run

from refimpl.comm.axes import Axes
from refimpl.comm.group import Group
from refimpl.engine.initialize import initialize
from refimpl.model.experts import StackedExperts
from refimpl.model.gates import Routing
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.model.moe import layers, mixtures
from refimpl.parallel.expert.swap import expert_parallel, whole_state_dict

SHAPE = GPTConfig(vocab=32, context=8, width=64, layers=2, heads=2)  # of a multiple of 64, for Adam's bits


def engine_of(ep: int, stage: int, seed: int) -> tuple[Any, Axes]:
    axes = Axes.of_data(Group.world()).with_experts(ep)
    torch.manual_seed(seed)
    model = mixtures(GPT(SHAPE), 4, Routing(k=2), every=2, balance=0.02)
    for layer in layers(model):
        layer.experts = StackedExperts(64, 64, 4)
    expert_parallel(model, axes)
    settings = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    }
    return initialize(model=model, config=settings)[0], axes


def losses(engine: Any, steps: range) -> list[float]:
    found = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + Group.world().rank)
        ids = torch.randint(32, (3, 9), generator=generator)
        loss = engine(ids[:, :-1], ids[:, 1:])
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def goes_on(folder: Path, stage: int) -> list[list[float]]:
    """Runs on every rank: losses after a checkpoint of ep 2, of the run itself and of others that load it."""
    engine, axes = engine_of(2, stage, 0)
    losses(engine, range(2))
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder, "weights.bin")
    if stage < 3:
        whole = whole_state_dict(engine.module, axes.expert)
        axes.world.barrier()
        saved = torch.load(folder / "weights.bin")
        assert saved.keys() == whole.keys()
        assert all(torch.equal(saved[name], whole[name]) for name in saved)
    found = [losses(engine, range(2, 4))]
    for ep in (2, 1):
        engine, _ = engine_of(ep, stage, 7)
        engine.load_checkpoint(folder)
        found.append(losses(engine, range(2, 4)))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_of_stacked_experts_goes_on_at_any_ep(stage: int, tmp_path: Path) -> None:
    for first, same, one in run(goes_on, tmp_path, stage, ranks=2):
        assert first == same == one
