"""The kinds of files that transformers, LLaMA-Factory, axolotl, accelerate and DeepSpeed's examples come with.

All their keys and values, in dictionaries of our own.
"""

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refimpl.engine.config import load_config
from refimpl.engine.configuration.keys import ConfigError, ConfigWarning
from refimpl.engine.configuration.schema import DeepSpeedConfig
from refimpl.engine.trained import make_scheduler, named_optimizer

Config = dict[str, Any]

SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
BATCH = dict.fromkeys(["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"], "auto")
ADAMW = {"type": "AdamW", "params": dict.fromkeys(["lr", "betas", "eps", "weight_decay"], "auto")}
WARMUP = dict.fromkeys(["warmup_min_lr", "warmup_max_lr", "warmup_num_steps"], "auto")
COMMON: Config = BATCH | {"gradient_clipping": "auto", "fp16": {"enabled": "auto"} | SCALE, "bf16": {"enabled": "auto"}}
ZERO3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    **dict.fromkeys(
        ["reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"], "auto"
    ),
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
ZERO2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
SHORT = {
    **{name: value for name, value in ZERO3.items() if not name.startswith("stage3_max") and "16bit" not in name},
    "sub_group_size": 0,
    "max_live_parameters": 0,
    "max_reuse_distance": 0,
    "gather_16bit_weights_on_model_save": True,
}

KINDS: dict[str, Config] = {
    "transformers, stage 2": COMMON
    | {"optimizer": ADAMW, "scheduler": {"type": "WarmupLR", "params": WARMUP}, "zero_optimization": ZERO2}
    | {"steps_per_print": 2000, "wall_clock_breakdown": False},
    "transformers, stage 3": COMMON
    | {"optimizer": ADAMW, "scheduler": {"type": "WarmupLR", "params": WARMUP}, "zero_optimization": ZERO3},
    "transformers, with buckets of 0": COMMON
    | {
        "zero_optimization": ZERO3 | {"sub_group_size": 1e14, "reduce_bucket_size": 0, "stage3_prefetch_bucket_size": 0}
    },
    "accelerate": COMMON
    | {
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupDecayLR", "params": WARMUP | {"total_num_steps": "auto"}},
        "zero_optimization": ZERO3 | {"stage3_gather_16bit_weights_on_model_save": "auto"},
    },
    "LLaMA-Factory": COMMON
    | {"zero_allow_untested_optimizer": True, "zero_optimization": ZERO2 | {"round_robin_gradients": True}},
    "LLaMA-Factory, fp8": COMMON
    | {
        "zero_force_ds_cpu_optimizer": True,
        "zero_optimization": ZERO3,
        "comms_config": {"verbose": False},
        "monitor_config": {"enabled": True, "tag": "run", "csv_monitor": {"enabled": False}},
        "_comment": "which models this is for",
    },
    "axolotl, stage 1": COMMON
    | {"zero_optimization": {"stage": 1, "overlap_comm": True}, "compile": {"disable": False, "backend": "inductor"}}
    | {"fp16": {"enabled": "auto", "auto_cast": False, **SCALE, "initial_scale_power": 32}},
    "axolotl, stage 3": COMMON | {"bf16": {"enabled": True}, "zero_optimization": SHORT},
    "DeepSpeedExamples": {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 3,
        "cuda_visible_devices": "0",
        "steps_per_print": 10,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 3e-5, "weight_decay": 0.0, "bias_correction": False, "max_grad_norm": 1.0},
        },
        "fp16": {"enabled": False},
        "zero_optimization": True,
    },
    "Megatron-DeepSpeed": {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 0, "elastic_checkpoint": False},
        "prescale_gradients": True,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "curriculum_learning": {"enabled": False, "curriculum_type": "seqlen", "min_difficulty": 64},
        "data_efficiency": {"enabled": True, "data_sampling": {"enabled": False, "num_workers": 0}},
        "wall_clock_breakdown": False,
    },
}
TRAINER = {  # what the Trainer of transformers puts in place of "auto"
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 1.0,
    "lr": 5e-5,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "warmup_num_steps": 10,
    "total_num_steps": 100,
}


def load(config: Config) -> DeepSpeedConfig:
    """On 4 ranks, for a bf16 model of width 32."""
    model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    model.config = SimpleNamespace(hidden_size=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return load_config(config, world_size=4, model=model, auto=TRAINER)


@pytest.mark.parametrize("kind", KINDS)
def test_it_loads_and_its_parts_can_be_made(kind: str) -> None:
    config = copy.deepcopy(KINDS[kind])
    loaded = load(config)
    assert config == KINDS[kind]
    sizes = (loaded.train_micro_batch_size_per_gpu, loaded.gradient_accumulation_steps, loaded.train_batch_size)
    assert sizes == {"DeepSpeedExamples": (3, 2, 24), "Megatron-DeepSpeed": (4, 1, 16)}.get(kind, (2, 3, 24))
    assert loaded.gradient_clipping == 1.0
    assert loaded.dtype == (torch.float32 if kind == "DeepSpeedExamples" else torch.bfloat16)
    assert loaded.zero_config().reduce_bucket_size >= 1
    if loaded.optimizer is None:
        return
    optimizer = named_optimizer(loaded.optimizer.type, [torch.nn.Parameter(torch.ones(8))], loaded.optimizer.params)
    assert optimizer.defaults["lr"] == (3e-5 if kind == "DeepSpeedExamples" else 5e-5)
    schedule = make_scheduler(None, loaded.scheduler, optimizer)
    if schedule is not None:
        schedule.step(10)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-5)


@pytest.mark.parametrize("kind", ["Adam", "OneBitAdam", "ZeroOneAdam", "Lamb"])
def test_an_optimizers_own_clipping_is_the_engines_or_refused(kind: str) -> None:
    """DeepSpeed raises for any; to clip at another norm, or not at all, would train another model in silence."""

    def asked(norm: object, **more: object) -> Config:
        return {"train_batch_size": 4, "optimizer": {"type": kind, "params": {"max_grad_norm": norm}}, **more}

    for norm, more in ((1.0, {}), (0.5, {"gradient_clipping": 0.5}), (0.0, {}), (None, {}), ("auto", {})):
        assert load(asked(norm, **more)).gradient_clipping == more.get("gradient_clipping", 1.0)
    for norm, more in ((5.0, {}), (1.0, {"gradient_clipping": 0})):
        with pytest.raises(ConfigError, match=r"max_grad_norm = .*at gradient_clipping = \d: set that key instead"):
            load(asked(norm, **more))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "DeepSpeedExamples"])
@pytest.mark.parametrize(("section", "device"), [("offload_optimizer", "cpu"), ("offload_param", "nvme")])
def test_offload_is_read(kind: str, section: str, device: str) -> None:
    config = copy.deepcopy(KINDS[kind])
    options = {"nvme_path": "/disk", "buffer_count": 4}
    for off in ("none", "auto"):
        config["zero_optimization"][section] = options | {"device": off}
        assert load(config) == load(KINDS[kind])
    config["zero_optimization"] |= {section: options | {"device": device}, "stage": 3}  # below it no parameter leaves
    found = getattr(load(config).zero_optimization, section)
    assert {name: getattr(found, name) for name in options} == options
    assert found.device == device


def test_sizes_that_follow_from_the_models_width() -> None:
    zero = load(KINDS["transformers, stage 3"]).zero_optimization
    assert zero.reduce_bucket_size == 32 * 32
    assert zero.stage3_prefetch_bucket_size == 32 * 32 * 9 // 10
    assert zero.stage3_param_persistence_threshold == 320
    zero = load(KINDS["axolotl, stage 3"]).zero_optimization
    assert (zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance) == (0, 0)
    assert zero.stage3_gather_16bit_weights_on_model_save
