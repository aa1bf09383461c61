"""Arguments of an optimizer or a schedule, as a file gives them, against the signature of its class.

What the class annotates as a number must be one, text that reads as one ("2e-5") included; finite, and not negative
unless the table below says so. torch's classes check little of this: a rate of NaN trains, a rate of true is 1.
"""

import ast
import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import Parameter, formatannotation, signature
from numbers import Real
from typing import Any

import torch

from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.quote import quote

SIGNED = ("beta2_decay", "decay_mom_rate", "last_batch_iteration", "last_epoch", "ns_coefficients")
BELOW_ONE = ("betas", "coeff_beta", "momentum", "cycle_min_mom", "cycle_max_mom", "base_momentum", "max_momentum")
AT_LEAST_ONE = (
    *("total_num_steps", "lr_range_test_step_size", "cycle_first_step_size"),
    *("step_size", "step_size_up", "T_max", "T_0", "T_mult", "total_iters", "total_steps", "epochs", "steps_per_epoch"),
    *("freeze_step", "var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"),
)


def read(section: str, make: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` of `make`, whose first argument is not theirs, with numbers as numbers.

    Raises `ConfigError`, a line for each argument that is unknown, missing or wrong: `section.params.NAME...`.
    """
    known = dict(list(signature(make).parameters.items())[1:])
    name_of_make = getattr(make, "__name__", str(make))
    problems, values = [], {}
    for name, value in params.items():
        path = f"{section}.params.{name}"
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; it takes {', '.join(known)}"
            problems.append(f"{path}: {name_of_make} has no such parameter{hint}")
            continue
        try:
            values[name] = _value(name, known[name], value)
        except ValueError as error:
            problems.append(f"{path} = {quote(value)}: {error}")
    for name, argument in known.items():
        if argument.default is Parameter.empty and name not in params:
            problems.append(f"{section}.params.{name}: {name_of_make} needs it; add it to {section}.params")
    if problems:
        raise ConfigError("\n".join(problems))
    return values


def flag(path: str, value: Any) -> bool:
    """True or false; `ConfigError` for anything else."""
    try:
        return _flag(value)
    except ValueError as error:
        raise ConfigError(f"{path} = {quote(value)}: {error}") from None


def _value(name: str, argument: Parameter, value: Any) -> Any:
    """`value` as the annotation wants it: torch writes some as text, and DeepSpeed's JSON has no tuples."""
    kind = argument.annotation
    kind = "" if kind is Parameter.empty else kind if isinstance(kind, str) else formatannotation(kind)
    if value is None and ("None" in kind or argument.default is None):
        return None
    if any(made in kind for made in ("Callable", "Optimizer", "LRScheduler")):
        raise ValueError("a file cannot hold what this argument takes; make the object in the training script")
    if kind.startswith("tuple["):
        return _tuple(name, kind, value)
    if isinstance(value, list | tuple) and any(many in kind for many in ("list[", "Sequence[", "Iterable[")):
        return [_number(name, kind, one) for one in value]
    if kind in ("list[int]", "Iterable[int]"):
        raise ValueError("must be a list of whole numbers")
    if "float" in kind or "int" in kind:
        return _number(name, kind, value)
    if "bool" in kind:
        return _flag(value)
    if kind.startswith("Literal[") and value not in ast.literal_eval(kind.removeprefix("Literal")):
        raise ValueError(f"must be one of {kind.removeprefix('Literal[').removesuffix(']')}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError("must be true or false")
    return bool(value)


def _tuple(name: str, kind: str, value: Any) -> tuple[Any, ...]:
    kinds = kind.removeprefix("tuple[").removesuffix("]").split(", ")
    if not isinstance(value, list | tuple) or len(value) != len(kinds):
        raise ValueError(f"must be a list of {len(kinds)} numbers")
    pairs = zip(kinds, value, strict=True)
    return tuple(None if one is None and "None" in part else _number(name, part, one) for part, one in pairs)


def _number(name: str, kind: str, value: Any) -> Any:
    """A number in its range, whole where `kind` says int. A rate kept in a tensor stays there."""
    if isinstance(value, torch.Tensor) and "Tensor" in kind:
        return value
    number = _finite(value)
    if "float" not in kind:
        if number != int(number):
            raise ValueError("must be a whole number")
        number = int(number)
    least = 1 if name in AT_LEAST_ONE else -math.inf if name in SIGNED else 0
    if number < least:
        raise ValueError("must be at least 1" if least else "must not be negative")
    if name in BELOW_ONE and number >= 1:
        raise ValueError("must be below 1")
    return number


def _finite(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, Real | str):
        raise ValueError("must be a number")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError("must be a number") from None
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    return value if isinstance(value, int) else number
