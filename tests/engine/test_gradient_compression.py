"""`gradient_compression` in the JSON: every operator trains, goes on from a checkpoint; what cannot be is refused."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from saving import same, settings, start, train, weights
from test_engine_checkpoint import stop_and_go_on

from refimpl.compress.blocks import Blocks
from refimpl.compress.compression import Compression
from refimpl.compress.powersgd import PowerSGD
from refimpl.compress.randomk import RandomK
from refimpl.compress.sign import Sign
from refimpl.compress.topk import TopK
from refimpl.engine.config import load_config
from refimpl.engine.configuration.keys import ConfigError

MEANING: list[tuple[dict[str, Any], Compression]] = [
    ({"type": "topk", "ratio": 0.05}, Compression(TopK(0.05))),
    ({"type": "TopK", "exchange": "served"}, Compression(TopK(), "served")),
    (
        {"type": "randomk", "ratio": 0.2, "seed": 3, "error_feedback": False},
        Compression(RandomK(0.2, 3, True), None, False),
    ),
    ({"type": "int8", "block_size": 64, "start_step": 2}, Compression(Blocks(8, 64), start_step=2)),
    ({"type": "int4", "stochastic": True}, Compression(Blocks(4, stochastic=True))),
    ({"type": "int4", "error_feedback": False}, Compression(Blocks(4, stochastic=True), None, False)),
    ({"type": "sign", "exchange": "gathered"}, Compression(Sign(), "gathered")),
    ({"type": "powersgd", "rank": 2, "least_ratio": 1.5, "warm_start": False}, Compression(PowerSGD(2, 1.5, False))),
]


def config_of(section: Any, stage: int = 0, **more: Any) -> dict[str, Any]:
    return settings(stage, gradient_compression=section, **more)


@pytest.mark.parametrize(("section", "expected"), MEANING)
def test_what_the_keys_mean(section: dict[str, Any], expected: Compression) -> None:
    assert load_config(config_of(section, 1), world_size=2).zero_config().compression == expected


WRONG: list[tuple[Any, str]] = [
    ({"type": "topk", "ratoi": 0.1}, "gradient_compression.ratoi: unknown key; did you mean ratio"),
    ({"type": "topk", "rank": 2}, "rank is a key of powersgd; with topk it has no effect"),
    ({"type": "topk", "enabled": True}, "gradient_compression.enabled: unknown key; DeepSpeed has none of this name"),
    ({"type": "top"}, "gradient_compression.type"),
    ({}, "gradient_compression.type"),
    ({"type": "topk", "ratio": 0}, "gradient_compression.ratio"),
    ({"type": "int8", "block_size": 0}, "gradient_compression.block_size"),
    ({"type": "sign", "error_feedback": False}, "is biased"),
    ("topk", "a section is an object"),
]


@pytest.mark.parametrize(("section", "says"), WRONG)
def test_what_is_wrong_is_named(section: Any, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(config_of(section), world_size=2)
    assert says in str(error.value)


@pytest.mark.parametrize("stage", [2, 3])
def test_stages_without_room_refuse(stage: int) -> None:
    with pytest.raises(ConfigError, match=f"stage {stage} keeps no whole gradient.*stage 0 or 1"):
        load_config(config_of({"type": "sign"}, stage), world_size=2)


def test_an_optimizer_that_compresses_by_itself_refuses() -> None:
    one_bit = {"type": "OneBitAdam", "params": {"lr": 0.01}}
    with pytest.raises(ConfigError, match=r"gradient_compression: optimizer.type .* compresses by itself"):
        load_config(config_of({"type": "sign"}, optimizer=one_bit), world_size=2)


@pytest.mark.parametrize(
    ("stage", "section", "more"),
    [
        (0, {"type": "sign"}, {"fp16": {"enabled": True}}),
        (1, {"type": "topk", "ratio": 0.1}, {"bf16": {"enabled": True}}),
        (1, {"type": "powersgd", "rank": 1}, {}),
        (0, {"type": "randomk", "ratio": 0.3, "start_step": 1}, {"gradient_accumulation_steps": 1}),
    ],
)
def test_a_checkpoint_goes_on_with_the_errors(
    stage: int, section: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    worlds.run(stop_and_go_on, config_of(section, stage, **more), tmp_path, ranks=2)


def write(config: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    engine = start(config)
    train(engine, range(2))
    engine.save_checkpoint(folder)
    return weights(engine)


def read(config: dict[str, Any], folder: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    engine = start(config, seed=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.load_checkpoint(folder)
    loaded = weights(engine)
    train(engine, range(1))
    return [str(w.message) for w in caught], loaded


def test_a_checkpoint_of_other_ranks_says_what_is_lost(tmp_path: Path) -> None:
    """Weights and optimizer go on; from a run without compression errors begin at zero without a word."""
    section = {"type": "topk", "ratio": 0.1}
    saved = worlds.run(write, config_of(section), tmp_path / "two", ranks=2)[0]
    results = worlds.run(read, config_of(section, 1), tmp_path / "two", ranks=3)
    assert same(results[0][1], saved)
    assert ["of 2 ranks" in text and "begins at zero" in text for text in results[0][0]] == [True]
    assert [warned for warned, _ in results[1:]] == [[], []]
    worlds.run(write, settings(0), tmp_path / "plain", ranks=2)
    assert worlds.run(read, config_of(section), tmp_path / "plain", ranks=2)[0][0] == []
