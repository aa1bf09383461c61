"""Broken configurations: one value, name or key of a good one is changed, and every error names where.

What loads all the same must train: its rates are finite and not negative, and its parts can be made.
"""

import copy
import math
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from refimpl.engine.config import load_config
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.trained import make_scheduler, named_optimizer

GOOD: list[dict[str, Any]] = [
    {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 10,
        "communication_data_type": "fp32",
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 10}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": 5e8,
            "sub_group_size": 1e9,
            "stage3_max_live_parameters": 1e9,
            "leaf_module": {"classes": ["Block"]},
            "offload_optimizer": {"device": "none", "pin_memory": True},
        },
    },
    {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 5, "decay_step_size": 2},
        },
        "zero_optimization": {"stage": 2, "allgather_partitions": True, "max_reuse_distance": 0},
        "data_types": {"grad_accum_dtype": "fp32"},
        "tensorboard": {"enabled": False, "output_path": "runs"},
        "activation_checkpointing": {"partition_activations": False},
        "checkpoint": {"tag_validation": "Warn"},
        "flops_profiler": {"enabled": False, "profile_step": 1},
    },
    {
        "train_batch_size": 2,
        "optimizer": {"type": "Lion", "params": {"lr": "3e-5", "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}},
        "comms_logger": {"enabled": False, "prof_ops": []},
        "aio": {"block_size": 1048576},
    },
]
NASTY: list[Any] = [
    *(None, True, False, 0, 1, -1, 2.5, -1e-9, 1e400, -1e400, math.nan, 10**30, 10**5000, 1e-320),
    *("", "auto", "abc", "1e-3", "nan", "-1", "None", "x" * 10_000, "\0", "😀"),
    *([], [1], [[]], [None], ["auto"], [math.nan, 0.9], {}, {"a": 1}, {"": {}}, {"enabled": "auto"}, {7: 7}),
]


def deep(levels: int) -> list[Any]:
    """A list in a list in a list ..."""
    return [deep(levels - 1)] if levels else []


def paths(config: dict[str, Any], parents: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        yield (*parents, name)
        if isinstance(value, dict):
            yield from paths(value, (*parents, name))


def mutate(config: dict[str, Any], dice: random.Random) -> tuple[str, ...]:
    """Change `config` in one place; the path of the place."""
    *parents, name = path = dice.choice(sorted(paths(config)))
    home = config
    for parent in parents:
        home = home[parent]
    kind = dice.random()
    if kind < 0.7:
        home[name] = dice.choice([*NASTY, deep(400)])
    elif kind < 0.8:
        del home[name]
    else:
        changed = dice.choice(
            [name + "s", name[1:], name.upper(), name[:-1] + "\n", f"{name}.{name}", "stage3_" + name]
        )
        home[changed] = home.pop(name)
        return (*parents, changed)
    return path


def use(config: dict[str, Any]) -> list[float]:
    """Load it and make its parts; the rates at the start and on the way."""
    loaded = load_config(config, world_size=2)
    if loaded.optimizer is None:
        return []
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = named_optimizer(loaded.optimizer.type, [weight], loaded.optimizer.params)
    rates = [float(optimizer.param_groups[0]["lr"])]
    schedule = make_scheduler(None, loaded.scheduler, optimizer)
    weight.grad = torch.ones(4)
    for _ in range(3 if schedule else 0):
        optimizer.step()
        schedule.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    loaded.loss_scaler()
    loaded.zero_config()
    return rates


def outcome(config: dict[str, Any]) -> tuple[list[float], str | None]:
    """The rates, or the error; any other exception than `ConfigError` is a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # keys without effect, schedules without steps to decay in
        try:
            return use(config), None
        except ConfigError as error:
            return [], str(error)


@pytest.mark.parametrize("good", range(len(GOOD)))
def test_every_mutation_loads_or_names_its_place(good: int) -> None:
    dice, refused = random.Random(good), 0
    assert use(copy.deepcopy(GOOD[good]))
    for _ in range(700):
        config = copy.deepcopy(GOOD[good])
        path = mutate(config, dice)
        rates, error = outcome(config)
        places = [".".join(path[: end + 1]) for end in range(len(path))]
        if error is None:
            assert all(0 <= rate < math.inf for rate in rates), (path, config)
        else:
            refused += 1
            assert any(place in error for place in places), (path, error)
            assert len(error) < 2_000
    assert 200 < refused < 650  # neither everything nor nothing
