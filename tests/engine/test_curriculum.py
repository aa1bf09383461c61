"""What a step's number tells the model: sequences that grow, layers that are dropped. And what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from torch import nn

import refimpl
from refimpl.deepspeed.pipe import PipelineModule
from refimpl.engine.config import load_config
from refimpl.engine.configuration.keys import ConfigError
from refimpl.optim.curriculum import CurriculumScheduler
from refimpl.optim.layer_drop import ProgressiveLayerDrop


class Told(nn.Module):
    """Remembers what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.heard: list[dict[str, Any]] = []

    def forward(self, x: torch.Tensor, **told: Any) -> torch.Tensor:
        self.heard.append(told)
        return self.layer(x).square().mean()


def config(**more: Any) -> dict[str, Any]:
    return {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **more}


def curriculum(kind: str, least: int, most: int, **schedule: Any) -> dict[str, Any]:
    return {
        "curriculum_learning": {
            "enabled": True,
            "min_difficulty": least,
            "max_difficulty": most,
            "schedule_type": kind,
            "schedule_config": schedule,
        }
    }


LINEAR = curriculum("fixed_linear", 2, 10, total_curriculum_step=8, difficulty_step=2)
DROP = {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.1}}


def train(engine: Any, steps: int) -> list[dict[str, Any]]:
    for _ in range(steps):
        engine.backward(engine(torch.ones(1, 2)))
        engine.step()
    return engine.module.heard


@pytest.mark.parametrize(
    ("section", "right"),
    [
        (LINEAR, [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]),
        (curriculum("fixed_discrete", 1, 4, difficulty=[1, 2, 4], max_step=[2, 5]), [1, 1, 2, 2, 2, 4, 4]),
        (
            curriculum("fixed_root", 0, 8, total_curriculum_step=16, difficulty_step=1, root_degree=2),
            [2, 2, 3, 4, 4, 4],
        ),
    ],
)
def test_sequences_grow_as_was_asked(section: dict[str, Any], right: list[int]) -> None:
    engine, *_ = refimpl.initialize(model=Told(), config=config(**section))
    assert [told["curriculum_seqlen"] for told in train(engine, len(right))] == right
    engine.eval()
    engine(torch.ones(1, 2))
    assert engine.module.heard[-1] == {}
    assert engine.curriculum_scheduler_legacy.get_current_difficulty() == right[-1]


def test_a_curriculum_of_ones_own() -> None:
    engine, *_ = refimpl.initialize(model=Told(), config=config(**curriculum("custom", 1, 9)))
    with pytest.raises(ValueError, match="call set_custom_get_difficulty first"):
        engine(torch.ones(1, 2))
    engine.curriculum_scheduler_legacy.set_custom_get_difficulty(lambda step: step**2)
    assert [told["curriculum_seqlen"] for told in train(engine, 4)] == [1, 4, 9, 9]
    other = curriculum("fixed_discrete", 1, 2, difficulty=[1, 2], max_step=[1])
    other["curriculum_learning"]["curriculum_type"] = "vocabulary"  # which the script asks the engine for
    engine, *_ = refimpl.initialize(model=Told(), config=config(**other))
    assert train(engine, 2) == [{}, {}]
    assert engine.curriculum_scheduler_legacy.get_current_difficulty() == 2


def test_layers_are_dropped_by_and_by_and_from_a_checkpoint_on(tmp_path: Path) -> None:
    engine, *_ = refimpl.initialize(model=Told(), config=config(**DROP, **LINEAR))
    whole = ProgressiveLayerDrop(0.5, 0.1)
    for step in range(3):
        train(engine, 1)
        whole.update_state(step)
        assert engine.get_pld_theta() == whole.get_theta()
    assert [told["pld_theta"] for told in engine.module.heard[:2]] == [1, 1]
    assert engine.module.heard[2]["progressive_layer_drop"] is True
    engine.save_checkpoint(tmp_path)
    again, *_ = refimpl.initialize(model=Told(), config=config(**DROP, **LINEAR))
    again.load_checkpoint(tmp_path)
    assert train(again, 2) == train(engine, 2)[3:]
    train(engine, 5)
    engine.load_checkpoint(tmp_path)  # an earlier one, behind the most difficulty
    assert train(engine, 2)[-2:] == again.module.heard
    plain, *_ = refimpl.initialize(model=Told(), config=config())
    assert plain.get_pld_theta() is plain.progressive_layer_drop is plain.curriculum_scheduler_legacy is None
    assert train(plain, 1) == [{}]


def test_a_model_that_cannot_be_told_says_so() -> None:
    engine, *_ = refimpl.initialize(model=nn.Linear(2, 1), config=config(**DROP))
    with pytest.raises(TypeError, match="unexpected keyword argument 'p"):
        engine(torch.ones(1, 2))


def piped() -> list[int]:
    def model() -> PipelineModule:
        return PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], 2, loss_fn=nn.functional.mse_loss)

    with pytest.raises(NotImplementedError, match=r"progressive_layer_drop\.enabled: not with a pipeline"):
        refimpl.initialize(model=model(), config=config(**DROP))
    engine, *_ = refimpl.initialize(model=model(), config=config(**LINEAR))
    seen = []
    for _ in range(3):
        rows = engine.curriculum_scheduler_legacy.update_difficulty(engine.global_steps + 1)
        engine.train_batch(iter([(torch.ones(rows, 2), torch.zeros(rows, 2))]))
        seen.append(engine.curriculum_scheduler_legacy.get_current_difficulty())
        rows = engine.curriculum_scheduler_legacy.update_difficulty(engine.global_steps + 1)  # as Megatron's does
        engine.eval_batch(iter([(torch.ones(rows, 2), torch.zeros(rows, 2))]))
    return seen


def test_a_pipeline_keeps_the_difficulty_for_who_cuts_the_sequences() -> None:
    assert worlds.run(piped, ranks=2) == [[2, 4, 4], [2, 4, 4]]


WRONG = [
    ({"min_difficulty": None}, "min_difficulty is missing"),
    ({"schedule_type": "linear"}, "schedule_type"),
    ({"schedule_config": {"total_curriculum_step": 8}}, r"difficulty_step is missing, which fixed_linear needs"),
    ({"schedule_type": "fixed_root"}, r"schedule_config\.root_degree is missing"),
    (
        {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [1], "max_step": [1]}},
        "difficulty must have one element more",
    ),
    ({"min_difficulty": 11}, "min_difficulty 11 is more than max_difficulty 10"),
    (
        {"schedule_config": {"total_curriculum_step": 8, "difficulty_step": 3}},
        "min_difficulty 2 is less than .*_step 3",
    ),
    (
        {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [2, 4, 10], "max_step": [5, 3]}},
        r"schedule_config\.max_step must not fall: \[5, 3\]",
    ),
    (
        {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [2, 10, 12], "max_step": [3, 5]}},
        r"schedule_config\.difficulty reaches max_difficulty 10 before its last: \[2, 10, 12\]",
    ),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_what_a_schedule_lacks_is_named(change: dict[str, Any], said: str) -> None:
    section = {**LINEAR["curriculum_learning"], **change}
    reads: list[tuple[type[Exception], Callable[[], object]]] = [
        (ConfigError, lambda: load_config(config(curriculum_learning=section), world_size=1)),
        (ValueError, lambda: CurriculumScheduler(section)),
    ]
    for error, read in reads:
        with pytest.raises(error, match=said):
            read()
    off = {**section, "enabled": False}
    if "schedule_type" not in change or change["schedule_type"] != "linear":
        assert load_config(config(curriculum_learning=off), world_size=1).curriculum_learning.enabled is False
