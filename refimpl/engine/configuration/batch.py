"""The batch triple: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size.

Two of the three give the third, the first or the second alone leaves one micro-batch a step, and nothing is rounded:
a size that does not divide is an error that shows the arithmetic. DeepSpeed's function divides with a floor and then
asserts the product: `_set_batch_related_parameters` in deepspeed/runtime/config.py. Its world size counts tensor ranks,
which share their data, and so does transformers' "auto": where all three are given, that product is taken too.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from pydantic import TypeAdapter, ValidationError

from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.quote import quote
from refimpl.engine.configuration.values import Positive, whole_number

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def complete(values: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """`values` with all three sizes; `world_size` counts the data-parallel ranks. Raises `ConfigError`."""
    train, micro, steps = (size(values, key) for key in (TRAIN, MICRO, STEPS))
    if train is None and micro is None:
        raise ConfigError(
            f"neither {TRAIN} nor {MICRO} is given; set one of them ({TRAIN} = {MICRO} x {STEPS} x world size)"
        )
    if micro is None and train is not None:
        steps = steps or 1
        micro = _quotient(train, MICRO, {STEPS: steps, "world size": world_size})
    elif steps is None and micro is not None:
        steps = 1 if train is None else _quotient(train, STEPS, {MICRO: micro, "world size": world_size})
    assert micro is not None
    assert steps is not None
    product = micro * steps * world_size
    if train is not None and train not in (product, product * _tensor_ranks(values)):
        raise ConfigError(
            f"{TRAIN} = {train}, but {MICRO} {micro} x {STEPS} {steps} x world size {world_size} = {product}; "
            f"change one of them, or leave one out to have it computed"
        )
    return {**values, TRAIN: product, MICRO: micro, STEPS: steps}


def taken_otherwise(values: Mapping[str, Any], world_size: int) -> str:
    """Where the micro-batches of a step follow from both other sizes and DeepSpeed would find fewer: a note of it."""
    train, micro, steps = (size(values, key) for key in (TRAIN, MICRO, STEPS))
    tensor = _tensor_ranks(values)
    if tensor == 1 or steps or not (train and micro) or train % (micro * world_size * tensor):
        return ""
    ours = train // (micro * world_size)
    return (
        f"{STEPS}: {ours}, as {train} samples are {micro} a micro-batch on {world_size} ranks, each of other data; "
        f"DeepSpeed counts tensor ranks too, and takes {ours // tensor}: give the number to be sure"
    )


def _tensor_ranks(values: Mapping[str, Any]) -> int:
    """Ranks that share a model, and its data."""
    section = values.get("tensor_parallel")
    return whole_number(section.get("autotp_size")) if isinstance(section, Mapping) else 1


def size(values: Mapping[str, Any], key: str) -> int | None:
    """What one of the three says. ConfigError if that is no whole number of at least 1."""
    if values.get(key) is None:
        return None
    try:
        return TypeAdapter[int](Positive).validate_python(values[key])
    except ValidationError as error:
        raise ConfigError(f"{key} = {quote(values[key])}: must be a whole number of at least 1") from error


def _quotient(train: int, key: str, factors: Mapping[str, int]) -> int:
    names = " x ".join(f"{name} {size}" for name, size in factors.items())
    product = prod(factors.values())
    if train % product:
        raise ConfigError(f"{key} cannot be computed: {TRAIN} = {train} is not a multiple of {names} = {product}")
    return train // product
