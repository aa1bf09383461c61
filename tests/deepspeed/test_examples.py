"""DeepSpeedExamples' scripts in small, unchanged, on two ranks, refimpl under the name deepspeed."""

import json
from pathlib import Path

import pytest
from examples import CIFAR, GAN, HELLO, PIPELINE_BASE
from foreign import run_on_ranks


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "fp16"), (2, "bf16"), (3, "fp16")])
def test_cifar(stage: int, dtype: str, tmp_path: Path) -> None:
    arguments = ("--deepspeed", "--stage", str(stage), "--dtype", dtype)
    said = run_on_ranks(CIFAR, tmp_path, *arguments)
    assert said.count("cifar 24\n") == 2


def test_gan(tmp_path: Path) -> None:
    config = {"train_batch_size": 16, "steps_per_print": 100}
    config["optimizer"] = {"type": "Adam", "params": {"lr": 0.0002, "betas": [0.5, 0.999], "eps": 1e-8}}
    said = []
    for stage in range(4):  # both ranks have the same data, so all have the same losses
        (tmp_path / "config.json").write_text(json.dumps(config | {"zero_optimization": {"stage": stage}}))
        arguments = ("--deepspeed_config", str(tmp_path / "config.json"))
        said += run_on_ranks(GAN, tmp_path, *arguments).splitlines()
    assert len(said) == 8
    assert len(set(said)) == 1, said
    assert said[0].startswith("gan 20 20 ")
    assert float(said[0].split()[-1]) < 2


def test_hello_deepspeed_trains_and_goes_on(tmp_path: Path) -> None:
    assert run_on_ranks(HELLO, tmp_path, str(tmp_path / "out")).count("hello 1 30 2736\n") == 2
    said = run_on_ranks(HELLO, tmp_path, str(tmp_path / "out"), "go on")
    assert said.count("hello 31 60 2736\n") == 2


def test_the_pipeline_examples_base_path(tmp_path: Path) -> None:
    config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10}
    config["optimizer"] = {"type": "Adam", "params": {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("--deepspeed_config", str(tmp_path / "config.json"), "-p")
    said = run_on_ranks(PIPELINE_BASE, tmp_path, *arguments, "0")
    assert "pipeline 0 12\n" in said
    assert "pipeline 1 12\n" in said
