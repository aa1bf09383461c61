"""ZeRO-3's gathered weights: the planner's walk beside the meter, at the fullest of a step, whatever the budgets."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from worlds import run

from refimpl.engine.config import load_config
from refimpl.engine.initialize import initialize
from refimpl.measure.memory import MemoryMeter
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.plan.gathered import Budgets, elements
from refimpl.plan.judge import Machine, judge
from refimpl.plan.mesh import Mesh
from refimpl.plan.shape import of_gpt, of_size

MODEL = GPTConfig(vocab=100, context=8, width=64, layers=5, heads=4)
SHAPE = of_gpt(MODEL)
BLOCK = SHAPE.block()
BUDGETS = [
    Budgets(),  # DeepSpeed's: here everything stays for backward
    Budgets(0, 10**9, 0),
    Budgets(1, 10**9, 0),  # one unit ahead, however large
    Budgets(2 * BLOCK + 1000, 10**9, 0),
    Budgets(10**9, 3 * BLOCK, 0),
    Budgets(BLOCK, 10**9, 3 * BLOCK),
    Budgets(0, 10**9, 2 * BLOCK),
    Budgets(10**9, 4 * BLOCK, 5 * BLOCK),
]


def fullest(budgets: list[Budgets], tied: bool, micro_batches: int) -> list[int]:
    """Of each, the most bytes of gathered weights in steps that know their order."""
    return [of_one(b, tied, micro_batches) for b in budgets]


def of_one(budgets: Budgets, tied: bool, micro_batches: int) -> int:
    zero = {
        "stage": 3, "leaf_module": {"classes": ["Block"]}, "stage3_param_persistence_threshold": 0,
        **{f"stage3_{name}": value for name, value in vars(budgets).items()},
    }  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": zero,
    }  # fmt: skip
    model = GPT(MODEL)
    if not tied:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    engine, *_ = initialize(model=model, config=config)
    ids = torch.zeros(1, MODEL.context, dtype=torch.int64)
    stage: Any = engine.stage
    meter, need = MemoryMeter(stage.tensors), stage.fetch.need

    def watched(*args: Any) -> None:
        need(*args)
        meter.sample()

    stage.fetch.need = watched  # nothing is gathered elsewhere
    for _ in range(2 * micro_batches):
        engine.backward(engine(ids, ids))
        engine.step()
    return meter.peak["gathered"]


@pytest.mark.parametrize(("ranks", "tied", "micro_batches"), [(2, True, 1), (3, False, 2)])
def test_the_meter_finds_what_the_walk_says(ranks: int, tied: bool, micro_batches: int) -> None:
    expected = [4 * elements(replace(SHAPE, tied=tied), ranks, 1, 1, budgets) for budgets in BUDGETS]
    assert len(set(expected)) > 4, "the budgets decide"
    assert run(fullest, BUDGETS, tied, micro_batches, ranks=ranks) == [expected] * ranks


def test_the_planner_counts_them_and_knows_deepspeeds_budgets() -> None:
    shape = of_size(7e9)
    found = {zero: judge(shape, Mesh(64, 1, 1, 64, zero=zero), Machine()) for zero in ("zero2", "zero3")}
    gathered = found["zero3"].bytes["gathered"]
    assert "gathered" not in found["zero2"].bytes
    assert 2 * 1e9 < gathered < 2 * 1.5e9, "what is used again before a billion elements, a block, the embedding"
    assert gathered < found["zero2"].bytes["parameters"]
    settings = load_config({"train_batch_size": 1, "zero_optimization": {"stage": 3}}, world_size=1).zero_config()
    assert all(getattr(settings, name) == value for name, value in vars(Budgets()).items())
    assert settings.model_persistence_threshold == sys.maxsize
