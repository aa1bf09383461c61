"""Arguments of optimizers and schedules: numbers are numbers, in their range, and every error has the key's path."""

import json
import math
import re
from inspect import Parameter, isclass, signature
from typing import Any

import pytest
import torch

from refimpl.engine.config import load_config
from refimpl.engine.configuration.arguments import read
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.sections import Scheduler
from refimpl.engine.trained import make_scheduler, named_optimizer

NAN, INF = math.nan, math.inf
OPTIMIZERS = ("Adam", "AdamW", "Lion", "SGD", "Adagrad", "RMSprop", "Adadelta", "NAdam", "Adafactor")
NO_RATE = ["abc", "", "1e-3x", NAN, INF, -INF, "nan", "inf", -1e-3, "-1", True, False, None, [1e-3], {"a": 1}, 10**400]


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(64))]


def load(section: str, name: str, params: dict[str, Any]) -> Any:
    return load_config({"train_batch_size": 1, section: {"type": name, "params": params}}, world_size=1)


@pytest.mark.parametrize("value", NO_RATE)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_no_learning_rate(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^optimizer\.params\.lr = .*: must") as error:
        load("optimizer", name, {"lr": value})
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"^optimizer\.params\.lr = .*: must"):
        named_optimizer(name, weights(), {"lr": value})


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("value", [2e-5, "2e-5", "0.00002", " 2E-5 "])
def test_text_that_reads_as_a_number_is_that_number(name: str, value: Any) -> None:
    load("optimizer", name, {"lr": value})
    assert named_optimizer(name, weights(), {"lr": value}).param_groups[0]["lr"] == 2e-5


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("Adam", {"betas": [0.9]}, r"betas = \[0.9\]: must be a list of 2 numbers"),
        ("Adam", {"betas": [0.9, 0.99, 0.999]}, r"betas = .*: must be a list of 2 numbers"),
        ("Adam", {"betas": 0.9}, r"betas = 0.9: must be a list of 2 numbers"),
        ("AdamW", {"betas": [0.9, 1]}, r"betas = \[0.9, 1\]: must be below 1"),
        ("Lion", {"betas": [-0.1, 0.9]}, r"betas = .*: must not be negative"),
        ("Adam", {"betas": ["0.9", "x"]}, r"betas = .*: must be a number"),
        ("Adam", {"betas": [0.9, NAN]}, r"betas = .*: must be a finite number"),
        ("Adam", {"eps": -1e-8}, r"eps = -1e-08: must not be negative"),
        ("Adam", {"eps": "small"}, r"eps = 'small': must be a number"),
        ("Adam", {"weight_decay": -0.1}, r"weight_decay = -0.1: must not be negative"),
        ("Lion", {"weight_decay": True}, r"weight_decay = True: must be a number"),
        ("SGD", {"momentum": 1.5}, r"momentum = 1.5: must be below 1"),
        ("SGD", {"momentum": -0.5}, r"momentum = -0.5: must not be negative"),
        ("SGD", {"nesterov": "yes"}, r"nesterov = 'yes': must be true or false"),
        ("Adam", {"amsgrad": 2}, r"amsgrad = 2: must be true or false"),
        ("Adam", {"adam_w_mode": "no"}, r"adam_w_mode = 'no': must be true or false"),
        ("AdamW", {"torch_adam": 0.0}, r"torch_adam = 0.0: must be true or false"),
        ("LBFGS", {"max_iter": 2.5}, r"max_iter = 2.5: must be a whole number"),
        ("SGD", {"params": []}, r"params: SGD has no such parameter"),
    ],
)
def test_wrong_arguments_of_optimizers(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^optimizer\.params\.{message}"):
        load("optimizer", name, params)
    with pytest.raises(ConfigError, match=rf"^optimizer\.params\.{message}"):
        named_optimizer(name, weights(), params)


def test_what_only_the_class_can_say_names_the_section() -> None:
    with pytest.raises(ConfigError, match=r"^optimizer\.params: SGD: Nesterov momentum requires a momentum"):
        named_optimizer("SGD", weights(), {"lr": 0.1, "nesterov": True})
    two = Scheduler(type="WarmupLR", params={"warmup_max_lr": [0.1, 0.2]})
    with pytest.raises(ConfigError, match=r"^scheduler\.params: WarmupLR: warmup_max_lr has 2 values for 1 parameter"):
        make_scheduler(None, two, torch.optim.SGD(weights(), lr=0.1))


def test_all_wrong_arguments_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load("optimizer", "Adam", {"lr": "x", "betas": [1, 1], "epz": 0})
    assert [re.split("[ :]", line)[0].split(".")[-1] for line in str(error.value).splitlines()] == [
        "lr",
        "betas",
        "epz",
    ]


def test_what_is_right_stays() -> None:
    assert named_optimizer("Adafactor", weights(), {"eps": [None, "1e-3"], "beta2_decay": -0.8}).defaults["eps"] == (
        None,
        1e-3,
    )
    adam = named_optimizer("Adam", weights(), {"betas": ["0.9", 0.95], "foreach": True})
    assert adam.defaults["betas"] == (0.9, 0.95)
    assert (adam.defaults["foreach"], adam.defaults["fused"]) == (True, None)  # torch runs one of them
    rate = torch.tensor(0.1)
    assert named_optimizer("Adam", weights(), {"lr": rate}).param_groups[0]["lr"] is rate


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmupLR", {"warmup_max_lr": "fast"}, r"warmup_max_lr = 'fast': must be a number"),
        ("WarmupLR", {"warmup_min_lr": NAN}, r"warmup_min_lr = nan: must be a finite number"),
        ("WarmupLR", {"warmup_max_lr": -1}, r"warmup_max_lr = -1: must not be negative"),
        ("WarmupLR", {"warmup_max_lr": [0.1, "x"]}, r"warmup_max_lr = .*: must be a number"),
        ("WarmupLR", {"warmup_num_steps": -1}, r"warmup_num_steps = -1: must not be negative"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, r"warmup_num_steps = 2.5: must be a whole number"),
        ("WarmupLR", {"warmup_num_steps": None}, r"warmup_num_steps = None: must be a number"),
        ("WarmupLR", {"warmup_type": "cubic"}, r"warmup_type = 'cubic': must be one of 'log', 'linear'"),
        ("WarmupDecayLR", {}, r"total_num_steps: WarmupDecayLR needs it"),
        ("WarmupDecayLR", {"total_num_steps": True}, r"total_num_steps = True: must be a number"),
        ("WarmupCosineLR", {"total_num_steps": -1}, r"total_num_steps = -1: must be at least 1"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, r"lr_range_test_step_size = 0: must be at least 1"),
        ("LRRangeTest", {"lr_range_test_staircase": "no"}, r"lr_range_test_staircase = 'no': must be true or false"),
        ("OneCycle", {"cycle_min_lr": 0}, r"cycle_max_lr: OneCycle needs it"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_max_mom": 1}, r"cycle_max_mom = 1: must be below 1"),
        ("StepLR", {}, r"step_size: StepLR needs it"),
        ("StepLR", {"step_size": 0}, r"step_size = 0: must be at least 1"),
        ("MultiStepLR", {"milestones": 3}, r"milestones = 3: must be a list of whole numbers"),
        ("LambdaLR", {"lr_lambda": "x"}, r"lr_lambda = 'x': a file cannot hold"),
    ],
)
def test_wrong_arguments_of_schedules(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^scheduler\.params\.{message}"):
        load("scheduler", name, params)
    section = Scheduler(type=name, params=params)
    with pytest.raises(ConfigError, match=rf"^scheduler\.params\.{message}"):
        make_scheduler(None, section, torch.optim.SGD(weights(), lr=0.1))


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("StepLR", {"step_size": "2", "gamma": "0.5"}),
        ("MultiStepLR", {"milestones": [2, 4.0]}),
        ("CosineAnnealingLR", {"T_max": 10.0, "eta_min": 0}),
        ("OneCycleLR", {"max_lr": ["0.1"], "total_steps": 20, "anneal_strategy": "linear"}),
        ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1, "step_size_down": None}),
        ("PolynomialLR", {"total_iters": 5}),
    ],
)
def test_torchs_schedules(name: str, params: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD(weights(), lr=0.1, momentum=0.9)
    schedule = make_scheduler(None, Scheduler(type=name, params=params), optimizer)
    optimizer.step()
    schedule.step()
    assert 0 <= optimizer.param_groups[0]["lr"] < 1


def test_every_annotation_of_torchs_optimizers_is_understood() -> None:
    """Each takes its own defaults, spelt as in a JSON file."""
    found = [c for c in vars(torch.optim).values() if isclass(c) and issubclass(c, torch.optim.Optimizer)]
    for kind in set(found) - {torch.optim.Optimizer}:
        defaults = {name: argument.default for name, argument in signature(kind).parameters.items()}
        given = {name: value for name, value in defaults.items() if value is not Parameter.empty}
        spelt = json.loads(json.dumps(given))
        assert read("optimizer", kind, spelt) == given
