"""Loading: files, types, precision, and the translation into the engine's own small configurations."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from refimpl.engine.config import load_config
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.schema import DeepSpeedConfig
from refimpl.optim.loss_scale import DynamicLossScaler
from refimpl.zero.config import ZeroConfig


def load(**config: Any) -> DeepSpeedConfig:
    return load_config({"train_batch_size": 8, **config}, world_size=2)


def test_a_dictionary_and_a_file_are_the_same(tmp_path: Path) -> None:
    config = {"train_batch_size": 8, "fp16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    assert load_config(path, world_size=2) == load_config(str(path), world_size=2) == load_config(config, world_size=2)


def test_the_given_dictionary_is_left_alone() -> None:
    config = {"train_batch_size": 8, "zero_optimization": {"stage3_prefetch_bucket_size": "auto"}}
    before = json.dumps(config)
    load_config(config, world_size=2)
    assert json.dumps(config) == before


@pytest.mark.parametrize("size", [500_000_000, 5e8, "5e8", "500000000"])
def test_counts_in_any_notation(size: Any) -> None:
    size_read = load(zero_optimization={"reduce_bucket_size": size}).zero_optimization.reduce_bucket_size
    assert size_read == 500_000_000
    assert isinstance(size_read, int)
    stage = load(zero_optimization={"stage": type(size)(2)}).zero_optimization.stage
    assert (stage, type(stage)) == (2, int)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("zero_optimization", "reduce_bucket_size", 0.5),
        ("zero_optimization", "reduce_bucket_size", -1),
        ("zero_optimization", "reduce_bucket_size", True),
        ("zero_optimization", "stage", 4),
        ("zero_optimization", "stage", "two"),
        ("zero_optimization", "stage", True),
        ("zero_optimization", "stage", None),
        ("zero_optimization", "reduce_bucket_size", "many"),
        ("zero_optimization", "reduce_bucket_size", 10**30),
        ("zero_optimization", "stage3_prefetch_bucket_size", -5e8),
        ("zero_optimization", "leaf_module", "Block"),
        ("fp16", "enabled", "perhaps"),
        ("fp16", "initial_scale_power", 500),
        ("fp16", "initial_scale_power", -1),
        ("fp16", "loss_scale", 1e39),
        ("fp16", "loss_scale", "high"),
        ("zero_optimization", "overlap_comm", "perhaps"),
        ("fp16", "loss_scale", -1),
        ("fp16", "loss_scale", float("inf")),
        ("fp16", "loss_scale", True),
        ("fp16", "hysteresis", 0),
        ("data_types", "grad_accum_dtype", "int8"),
        ("checkpoint", "tag_validation", "Maybe"),
    ],
)
def test_wrong_values_are_named(section: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        load(**{section: {key: value}})
    assert re.match(rf"{section}\.{key}(:| =) ", str(error.value))
    assert repr(value).lower() in str(error.value).lower()


def test_all_wrong_values_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load(
            gradient_clipping=-1,
            fp16={"hysteresis": 0},
            optimizer={"type": "SGD", "params": {"lr": "fast"}},
            scheduler={"type": "WarmupDecayLR"},
        )
    assert [re.split("[ :]", line)[0] for line in str(error.value).splitlines()] == [
        "optimizer.params.lr",
        "scheduler.params.total_num_steps",
        "gradient_clipping",
        "fp16.hysteresis",
    ]


def test_precision() -> None:
    assert load().dtype == torch.float32
    assert load(fp16={"enabled": True}).dtype == torch.float16
    assert load(bf16={"enabled": True}).dtype == torch.bfloat16
    for spelling in ("bfp16", "torch.bfloat16", "BF16", "bfloat16"):
        assert load(data_types={"param_dtype": spelling}).dtype == torch.bfloat16
    assert load(gradient_allreduce_op="SUM").gradient_allreduce_op == "sum"
    with pytest.raises(ConfigError, match=r"fp16.enabled and bf16.enabled are both true"):
        load(fp16={"enabled": True}, bf16={"enabled": True})
    assert load(bf16={"enabled": True}, data_types={"param_dtype": "bf16"}).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r"data_types.param_dtype is torch.float16, and bf16.enabled is true"):
        load(bf16={"enabled": True}, data_types={"param_dtype": "fp16"})


@pytest.mark.parametrize("section", ["fp16", "bf16", "zero_optimization", "optimizer", "scheduler", "tensorboard"])
@pytest.mark.parametrize("value", ["auto", "on", [], [1], 3, 2.5])
def test_a_section_is_an_object(section: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{section} = .*: a section is an object"):
        load(**{section: value})


def test_a_section_that_is_null_is_not_there() -> None:
    nulls = dict.fromkeys(["fp16", "bf16", "zero_optimization", "optimizer", "scheduler", "aio", "tensorboard"])
    assert load(**nulls) == load()
    assert load(optimizer={"type": "Adam", "params": None}) == load(optimizer={"type": "Adam"})


def test_loss_scaler() -> None:
    assert load().loss_scaler() is None
    assert load(bf16={"enabled": True}).loss_scaler() is None
    assert load(torch_autocast={"enabled": True}).loss_scaler() is None
    static = load(fp16={"enabled": True, "loss_scale": 128}).loss_scaler()
    assert static is not None
    static.update(overflow=True)
    assert static.scale == 128
    fp16 = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1, "min_loss_scale": 512}
    scaler = load(fp16=fp16, zero_optimization={"stage": 1}).loss_scaler()
    assert isinstance(scaler, DynamicLossScaler)
    assert scaler.scale == 1024
    scaler.update(overflow=True)
    assert scaler.scale == 512
    with pytest.raises(OverflowError):
        scaler.update(overflow=True)
    whole = load(fp16=fp16).loss_scaler()
    assert whole is not None
    for _ in range(9):
        whole.update(overflow=True)
    assert whole.scale == 512
    lower = load(fp16=fp16 | {"min_loss_scale": "0.5"}).loss_scaler()  # as trlx's example writes
    assert lower is not None
    for _ in range(12):
        lower.update(overflow=True)
    assert lower.scale == 0.5
    with pytest.raises(ConfigError, match=r"fp16\.min_loss_scale: .* greater than 0"):
        load(fp16=fp16 | {"min_loss_scale": 0})


def test_zero_config_has_deepspeeds_defaults() -> None:
    """The defaults of deepspeed/runtime/zero/config.py; overlap_comm follows the stage."""
    expected = ZeroConfig(
        reduce_bucket_size=int(5e8),
        allgather_bucket_size=int(5e8),
        overlap_comm=False,
        gradient_clipping=1.0,
        prefetch_bucket_size=int(5e7),
        param_persistence_threshold=int(1e5),
        max_live_parameters=int(1e9),
        max_reuse_distance=int(1e9),
    )
    assert load().zero_config() == expected
    assert [load(zero_optimization={"stage": s}).zero_config().overlap_comm for s in range(4)] == [False] * 3 + [True]
    for stage in (1, 3):
        for asked in (True, False):
            zero = load(zero_optimization={"stage": stage, "overlap_comm": asked})
            assert zero.zero_config().overlap_comm is asked


def test_a_bucket_of_nothing_holds_one_tensor() -> None:
    zero = load(zero_optimization={"reduce_bucket_size": 0, "allgather_bucket_size": 0}).zero_config()
    assert (zero.reduce_bucket_size, zero.allgather_bucket_size) == (1, 1)


def test_zero_config_takes_every_key() -> None:
    loaded = load(
        gradient_clipping=0.5,
        communication_data_type="fp32",
        prescale_gradients=True,
        gradient_predivide_factor=4,
        zero_allow_untested_optimizer=True,
        data_types={"grad_accum_dtype": "fp32"},
        zero_optimization={
            "stage": 3,
            "reduce_bucket_size": 1,
            "allgather_bucket_size": 2,
            "overlap_comm": False,
            "stage3_prefetch_bucket_size": 3,
            "stage3_param_persistence_threshold": 4,
            "stage3_model_persistence_threshold": 5,
            "stage3_max_live_parameters": 6,
            "stage3_max_reuse_distance": 7,
        },
    )
    assert loaded.zero_config() == ZeroConfig(
        reduce_bucket_size=1,
        allgather_bucket_size=2,
        overlap_comm=False,
        gradient_clipping=0.5,
        communication_data_type=torch.float32,
        grad_accum_dtype=torch.float32,
        prescale_gradients=True,
        gradient_predivide_factor=4.0,
        allow_untested_optimizer=True,
        prefetch_bucket_size=3,
        param_persistence_threshold=4,
        model_persistence_threshold=5,
        max_live_parameters=6,
        max_reuse_distance=7,
    )


def test_a_configuration_can_be_dumped_and_loaded_again() -> None:
    loaded = load(data_types={"grad_accum_dtype": "bf16"}, optimizer={"type": "Adam", "params": {"lr": 1e-3}})
    dumped = json.loads(loaded.model_dump_json(exclude_defaults=True))
    assert load_config(dumped, world_size=2) == loaded


def test_an_infinite_interval_means_never() -> None:
    assert load(steps_per_print=float("inf")).steps_per_print is None
