"""`deepspeed.elasticity`: what a scheduler asks, by DeepSpeed's names and with its errors; `refimpl elastic`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import refimpl.deepspeed as deepspeed
from refimpl.cli.main import main
from refimpl.deepspeed.elasticity import (
    DSElasticAgent,
    compute_elastic_config,
    constants,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)
from refimpl.deepspeed.elasticity.config import (
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from refimpl.deepspeed.git_version_info import version

SECTION = {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [1, 2], "min_time": 20, "version": 0.1}
CONFIG: dict[str, Any] = {"elasticity": SECTION, "a key of a later version": 1}  # a scheduler reads one section


def test_a_scheduler_asks() -> None:
    assert compute_elastic_config(CONFIG, version) == (12, [1, 2, 3, 4, 6, 12])
    assert compute_elastic_config(CONFIG, version, world_size=4) == (12, [1, 2, 3, 4, 6, 12], 1)
    assert elasticity_enabled(CONFIG)
    assert not elasticity_enabled({"elasticity": {"enabled": False}})
    assert not elasticity_enabled({})
    for config, target, ranks, kind in (
        (CONFIG, version, 5, ElasticityIncompatibleWorldSize),
        (CONFIG, "0.3.7", 0, ElasticityError),
        ({}, version, 0, ElasticityConfigError),
        ({"elasticity": {"enabled": True}}, version, 0, ElasticityConfigError),
    ):
        with pytest.raises(kind):
            compute_elastic_config(config, target, world_size=ranks)
    with pytest.raises(ValueError, match=r"^ds_config: must be a dictionary, not 'ds.json'$"):
        compute_elastic_config("ds.json", version)  # type: ignore[arg-type]


@pytest.mark.parametrize(("number", "together"), [(0.1, 1), (0.2, 2)])
def test_the_micro_batch_of_the_ranks_that_the_environment_says(
    number: float, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed divides by zero in version 0.1; in 0.2 it divides the batch by all ranks, those of a model too."""
    section = SECTION | {"version": number, "num_gpus_per_node": 2, "model_parallel_size": together}
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert compute_elastic_config({"elasticity": section}, version) == (12, [1, 2, 3, 4, 6, 12])
    with pytest.raises(ElasticityConfigError, match="WORLD_SIZE = '' in the environment"):
        compute_elastic_config({"elasticity": section}, version, return_microbatch=True)
    monkeypatch.setenv("WORLD_SIZE", str(6 * together))
    assert compute_elastic_config({"elasticity": section}, version, return_microbatch=True)[-1] == 2


def test_the_section_as_an_object_and_the_same_one_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ElasticityConfig(SECTION)
    assert (found.max_acceptable_batch_size, found.micro_batches, found.min_time) == (12, [1, 2], 20)
    assert (found.max_gpus, found.version) == (constants.MAX_GPUS_DEFAULT, 0.1)
    ensure_immutable_elastic_config(SECTION)
    monkeypatch.setenv(constants.DEEPSPEED_ELASTICITY_CONFIG, json.dumps(SECTION | {"micro_batch_sizes": [1]}))
    with pytest.raises(ElasticityConfigError, match=r"micro_batch_sizes \[1\] there, \[1, 2\] here"):
        ensure_immutable_elastic_config(SECTION)
    with pytest.raises(deepspeed.elasticity.config.ElasticityError):  # what scripts catch around `initialize`
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"elasticity": SECTION | {"min_time": 0}})
    with pytest.raises(NotImplementedError, match="torchrun --nnodes MIN:MAX"):
        DSElasticAgent()


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["refimpl", "elastic", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"elasticity": SECTION}))
    assert command(monkeypatch, "-c", str(file), "-w", "4") == 0
    said = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    values = {name: dotted.lstrip(". ") for name, dotted in said.items()}
    assert values == {
        "final_batch_size": "12",
        "valid_gpus": "[1, 2, 3, 4, 6, 12]",
        "micro_batch_size": "1",
        "accumulation_steps": "3",
    }
    assert command(monkeypatch, "--config", str(file), "--world-size", "5") == 2
    assert capsys.readouterr().err.startswith("refimpl elastic: elasticity: 5 data-parallel ranks do not share")
    file.write_text("{}")
    assert command(monkeypatch, "-c", str(file)) == 2
    assert "elasticity.enabled is not true" in capsys.readouterr().err
