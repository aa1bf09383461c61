"""A value spelt "auto": taken from the caller, else from the model or another key, else an error that names the key."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import refimpl
from refimpl.engine.config import load_config
from refimpl.engine.configuration.keys import ConfigError

HUGGING_FACE: dict[str, Any] = {  # the shape of the file in Hugging Face's DeepSpeed guide, without offload
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
GIVEN = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 3e-4,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "weight_decay": 0.1,
    "scheduler.params.warmup_num_steps": 100,
}


class Model(torch.nn.Linear):
    """A layer with a Hugging Face style config."""

    def __init__(self, dtype: torch.dtype = torch.float32, **config: Any) -> None:
        super().__init__(2, 2, dtype=dtype)
        self.config = SimpleNamespace(**config)


def test_a_hugging_face_file() -> None:
    loaded = load_config(HUGGING_FACE, world_size=2, model=Model(torch.bfloat16, hidden_size=30), auto=GIVEN)
    assert (loaded.train_batch_size, loaded.gradient_clipping) == (16, 1.0)
    assert (loaded.fp16.enabled, loaded.bf16.enabled) == (False, True)
    assert loaded.optimizer is not None
    assert loaded.scheduler is not None
    assert loaded.optimizer.params == {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert loaded.scheduler.params == {"warmup_min_lr": 0.0, "warmup_max_lr": 3e-4, "warmup_num_steps": 100}
    zero = loaded.zero_optimization
    assert zero.reduce_bucket_size == 30 * 30
    assert zero.stage3_prefetch_bucket_size == 30 * 30 * 9 // 10
    assert zero.stage3_param_persistence_threshold == 300


def test_what_cannot_be_resolved_is_named() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(HUGGING_FACE, world_size=2, auto={"train_micro_batch_size_per_gpu": 4})
    unresolved = {line.split(":")[0] for line in str(error.value).splitlines()}
    assert unresolved == {
        *("gradient_clipping", "fp16.enabled", "bf16.enabled"),
        *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
        *(f"scheduler.params.{name}" for name in ("warmup_max_lr", "warmup_num_steps")),
    }


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ({"hidden_size": 8}, 8),
        ({"hidden_sizes": [4, 16]}, 16),
        ({"width": 12}, 12),
        ({"text_config": SimpleNamespace(hidden_size=20), "vision_config": SimpleNamespace(hidden_size=8)}, 20),
    ],
)
def test_the_models_width(config: dict[str, Any], width: int) -> None:
    asked = {"train_batch_size": 2, "zero_optimization": {"reduce_bucket_size": "auto"}}
    assert load_config(asked, world_size=1, model=Model(**config)).zero_optimization.reduce_bucket_size == width**2


@pytest.mark.parametrize("stage", [2, 3])
def test_sizes_for_a_model_of_unknown_width_are_deepspeeds_defaults(stage: int) -> None:
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    for model in (None, Model()):
        asked, plain = (
            load_config(
                {"train_batch_size": 2, "zero_optimization": {"stage": stage} | more}, world_size=1, model=model
            )
            for more in (dict.fromkeys(sizes, "auto"), {})
        )
        assert asked == plain


def test_the_batch_triple_completes_itself() -> None:
    auto = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": "auto"}
    assert load_config(auto, world_size=4).train_batch_size == 12
    with pytest.raises(ConfigError, match="neither train_batch_size nor"):
        load_config(dict.fromkeys(auto, "auto"), world_size=4)


def test_the_callers_value_wins_over_a_rule() -> None:
    asked = {"train_batch_size": 2, "fp16": {"enabled": "auto"}}
    assert not load_config(asked, world_size=1, model=Model()).fp16.enabled
    assert load_config(asked, world_size=1, model=Model(), auto={"fp16.enabled": True}).fp16.enabled


def test_the_hint_is_true_for_who_calls_initialize_and_for_who_calls_load_config() -> None:
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": "auto"}}}
    with pytest.raises(ConfigError) as error:
        refimpl.initialize(model=Model(), config=config)
    assert 'optimizer.params.lr: "auto" cannot be resolved: only the training script knows it' in str(error.value)
    assert "Write a value in its place" in str(error.value)
    assert 'load_config yourself: or pass auto={"optimizer.params.lr": ...}' in str(error.value)
    assert "auto" not in inspect.signature(refimpl.initialize).parameters
    loaded = load_config(config, world_size=1, auto={"optimizer.params.lr": 0.5})
    assert loaded.optimizer is not None
    assert loaded.optimizer.params == {"lr": 0.5}


def test_what_deepspeed_leaves_at_its_default() -> None:
    """transformers and accelerate hand these on as they are; DeepSpeed's sections then drop them."""
    zero = {
        "stage": 3,
        "overlap_comm": "auto",
        "contiguous_gradients": "auto",
        "round_robin_gradients": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "max_live_parameters": "auto",
        "offload_optimizer": {"device": "auto", "nvme_path": "auto"},
    }
    config = {"train_batch_size": 2, "zero_optimization": zero, "fp16": {"loss_scale": "auto"}}
    plain = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    assert load_config(config, world_size=1) == load_config(plain, world_size=1)
    with pytest.raises(ConfigError, match=r'^zero_optimization.stage: "auto" cannot be resolved'):
        load_config({"train_batch_size": 2, "zero_optimization": {"stage": "auto"}}, world_size=1)
