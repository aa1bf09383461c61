"""A DeepSpeed JSON file becomes one frozen, fully resolved `DeepSpeedConfig`.

Steps: every key gets one of three answers (`keys`, `names`, `answer`), every "auto" a value (`auto`), the batch
triple is chosen (`elasticity`) or completed (`batch`), and pydantic checks types and ranges (`schema`). Nothing that
was asked for is dropped in silence. DeepSpeed's file: deepspeed/runtime/config.py.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from refimpl.engine.configuration import arguments
from refimpl.engine.configuration.answer import answer, table
from refimpl.engine.configuration.auto import resolve
from refimpl.engine.configuration.batch import complete, taken_otherwise
from refimpl.engine.configuration.elasticity import with_batch
from refimpl.engine.configuration.keys import ConfigError, ConfigWarning
from refimpl.engine.configuration.quote import quote, readable
from refimpl.engine.configuration.read import raw_config
from refimpl.engine.configuration.schema import DeepSpeedConfig
from refimpl.engine.configuration.zero_sections import ZeroOptimization
from refimpl.engine.names import optimizer_named, optimizer_problem, schedule_named
from refimpl.zero.config import PLUS


def load_config(
    config: Mapping[str, Any] | str | Path,
    *,
    world_size: int,
    model: torch.nn.Module | None = None,
    auto: Mapping[str, Any] | None = None,
    rank: int = 0,
    own_optimizer: bool = False,
) -> DeepSpeedConfig:
    """Read, answer, resolve and check a DeepSpeed configuration.

    `config` is a dictionary or the path of a file; `world_size` the number of ranks that read different data; `model`
    and `auto` fill in "auto" values (see configuration/auto.py). Warnings (`ConfigWarning`) come from rank 0 only;
    errors (`ConfigError`) come from every rank, name each wrong key with its full path, and list all that one step
    finds. own_optimizer: the caller brings one, so that which the file names is not built and may be one that nobody
    here knows.
    """
    raw = raw_config(config)
    raw, unbuilt = _without_unknown(raw) if own_optimizer else (raw, [])
    values, notes = answer(raw, table(DeepSpeedConfig))
    if rank == 0:
        for note in notes + unbuilt:
            warnings.warn(note, ConfigWarning, stacklevel=2)
    values = with_batch(resolve(values, model=model, given=auto or {}), world_size)
    if rank == 0 and (note := taken_otherwise(values, world_size)):
        warnings.warn(note, ConfigWarning, stacklevel=2)
    values = complete(values, world_size)
    problems = _wrong_arguments(values, ("scheduler",) if own_optimizer else ("optimizer", "scheduler"))
    try:
        settings = _whole_parameters_stay(DeepSpeedConfig.model_validate(values), rank)
        problems += _other_clipping(raw, settings.gradient_clipping)
    except ValidationError as error:
        problems += readable(error)
    if problems:
        raise ConfigError("\n".join(problems))
    return settings


def _without_unknown(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The file without an optimizer whose name is not known here or not there, and a note of it: as GPT-NeoX's are."""
    section = raw.get("optimizer")
    if not isinstance(section, Mapping) or optimizer_problem(section.get("type")) is None:
        return raw, []
    rest = {key: value for key, value in raw.items() if key != "optimizer"}
    name = f"= {quote(section['type'])}" if "type" in section else "is not given"
    return rest, [f"optimizer.type {name}: not built, as the script hands over its own optimizer"]


def _wrong_arguments(values: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """What is wrong with the arguments of optimizer and schedule, of which are built."""
    problems = []
    for name in names:
        given = values.get(name) or {}
        if "type" not in given:
            continue
        params = given.get("params") or {}
        try:
            if name == "optimizer":
                arguments.read(name, *optimizer_named(given["type"], params))
            else:
                arguments.read(name, schedule_named(given["type"]), params)
        except ConfigError as error:
            problems.append(str(error))
    return problems


def _whole_parameters_stay(settings: DeepSpeedConfig, rank: int) -> DeepSpeedConfig:
    """Without what is asked of shards of parameters that are not there: DeepSpeed ignores it too, without a word."""
    zero, nothing = settings.zero_optimization, ZeroOptimization()
    if zero.stage == 3:
        return settings
    asked = [name for name in PLUS if getattr(zero, name) not in (getattr(nothing, name), 0)]
    asked += ["offload_param"] if zero.offload_param.device != "none" else []
    if asked and rank == 0:
        warnings.warn(
            f"{', '.join(f'zero_optimization.{name}' for name in asked)}: parameters are sharded in stage 3 only, not "
            f"in stage {zero.stage}; no effect",
            ConfigWarning,
            stacklevel=3,
        )
    whole = zero.model_copy(update={name: getattr(nothing, name) for name in asked})
    return settings.model_copy(update={"zero_optimization": whole})


def _other_clipping(raw: Mapping[str, Any], bound: float) -> list[str]:
    """An optimizer that is to clip at another norm than the engine does: DeepSpeed refuses any, tutorials write one."""
    optimizer = raw.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, Mapping) else None
    asked = params.get("max_grad_norm") if isinstance(params, Mapping) else None
    if not asked or asked in ("auto", bound):
        return []
    return [
        f"optimizer.params.max_grad_norm = {quote(asked)}: no optimizer clips here, the engine does, at "
        f"gradient_clipping = {bound:g}: set that key instead"
    ]
