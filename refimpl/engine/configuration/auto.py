"""A value spelt "auto" is left to the training script or to the model, as in Hugging Face's files.

Taken, in this order, from the caller's `auto` dictionary (by full path, "optimizer.params.lr", or by last name, "lr"),
then from a rule below. What is left falls back to its default in the sections where DeepSpeed does the same (the sizes
of buckets, for a model that does not say how wide it is), and is an error that names the key elsewhere: no rate is
guessed. Source of the rules: `trainer_config_process` and `trainer_config_finalize` in
transformers/integrations/deepspeed.py.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from refimpl.engine.configuration.batch import MICRO, STEPS, TRAIN
from refimpl.engine.configuration.keys import ConfigError

Values = dict[str, Any]
Rule = Callable[[Values, torch.nn.Module | None], Any]


class Unresolved(Exception):
    """A rule lacks what it needs; the text says what."""


def hidden_size(model: torch.nn.Module | None) -> int:
    """The width that config, or its text_config, says: hidden_size, the largest of hidden_sizes, or width."""
    config = getattr(model, "config", None)
    for where in (config, getattr(config, "text_config", None)):  # of a model that sees, too
        for name in ("hidden_size", "hidden_sizes", "width"):
            size = getattr(where, name, None)
            if size is not None:
                return int(max(size)) if isinstance(size, list | tuple) else int(size)
    raise Unresolved("it follows from model.config.hidden_size (or hidden_sizes, or width), which is not there")


def has_dtype(dtype: torch.dtype) -> Rule:
    """Precision follows the dtype that the model already has."""

    def rule(values: Values, model: torch.nn.Module | None) -> bool:
        if model is None:
            raise Unresolved("it follows from the model's dtype, and no model was given")
        return next((p.dtype for p in model.parameters()), None) == dtype

    return rule


def peak_learning_rate(values: Values, model: torch.nn.Module | None) -> Any:
    """Warm-up ends at the optimizer's learning rate."""
    rate = ((values.get("optimizer") or {}).get("params") or {}).get("lr")
    if rate in (None, "auto"):
        raise Unresolved("it follows from optimizer.params.lr, which has no value")
    return rate


RULES: Mapping[str, Rule] = {
    "fp16.enabled": has_dtype(torch.float16),
    "bf16.enabled": has_dtype(torch.bfloat16),
    "data_types.keep_in_fp32_modules": lambda values, model: None,
    "scheduler.params.warmup_min_lr": lambda values, model: 0.0,
    "scheduler.params.warmup_max_lr": peak_learning_rate,
    "zero_optimization.reduce_bucket_size": lambda values, model: hidden_size(model) ** 2,
    "zero_optimization.stage3_prefetch_bucket_size": lambda values, model: int(0.9 * hidden_size(model) ** 2),
    "zero_optimization.stage3_param_persistence_threshold": lambda values, model: 10 * hidden_size(model),
}
DEFAULTED = (
    "fp16", "bf16", "zero_optimization", "csv_monitor", "tensorboard", "wandb", "comet", "comms_logger",
    "pipeline", "tensor_parallel", "sequence_parallel_size",
)  # fmt: skip


def resolve(values: Mapping[str, Any], *, model: torch.nn.Module | None, given: Mapping[str, Any]) -> Values:
    """A copy of `values` without any "auto". Raises `ConfigError` that lists all keys that stay unresolved."""
    result = _copy(values)
    problems = []
    for *parents, name in sorted(_autos(result), key=str):  # the optimizer's learning rate before the scheduler's
        home = result
        for parent in parents:
            home = home[parent]
        path = ".".join(map(str, [*parents, name]))
        try:
            home[name] = _value(path, result, model, given)
        except Unresolved as lack:
            if _unneeded(path):
                del home[name]
            else:
                problems.append(
                    f'{path}: "auto" cannot be resolved: {lack}. Write a value in its place '
                    f'(where you call load_config yourself: or pass auto={{"{path}": ...}})'
                )
    if problems:
        raise ConfigError("\n".join(problems))
    return result


def _copy(values: Mapping[str, Any]) -> Values:
    return {name: _copy(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def _autos(values: Mapping[str, Any], parents: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _autos(value, (*parents, name))
        elif isinstance(value, str) and value == "auto":
            yield (*parents, name)


def _value(path: str, values: Values, model: torch.nn.Module | None, given: Mapping[str, Any]) -> Any:
    for name in (path, path.rsplit(".", 1)[-1]):
        if name in given:
            return given[name]
    if path in RULES:
        return RULES[path](values, model)
    raise Unresolved("only the training script knows it")


def _unneeded(path: str) -> bool:
    """The batch triple completes itself, and some sections have defaults."""
    switches = ("fp16.enabled", "bf16.enabled", "zero_optimization.stage")
    return path in (TRAIN, MICRO, STEPS) or (path.split(".")[0] in DEFAULTED and path not in switches)
