"""Optimizers and schedules by name: DeepSpeed's own, then any class of torch.optim or torch.optim.lr_scheduler.

Optimizers are read in any case ("adamw"), schedules as they are spelt; DeepSpeed does the same with its own names.
DeepSpeed's functions: `_configure_basic_optimizer`, `_scheduler_from_config` in deepspeed/runtime/engine.py.
"""

from difflib import get_close_matches
from inspect import isclass

import torch

from refimpl.engine.keys import NOT_YET, Key
from refimpl.optim import schedule

OWN_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lion", "SGD")
OWN_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
LATER = ("Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Muon", "MuAdam", "MuAdamW", "MuSGD")


def optimizer_problem(name: object) -> str | None:
    """Why `optimizer.type = name` cannot be honoured; None when it can."""
    if str(name).lower() in (later.lower() for later in LATER):
        return f"optimizer.type = {name!r}: {NOT_YET}; use one of {', '.join(OWN_OPTIMIZERS)}"
    known = [*OWN_OPTIMIZERS, *_classes(torch.optim, torch.optim.Optimizer)]
    return None if str(name).lower() in (one.lower() for one in known) else _unknown("optimizer", name, known)


def schedule_problem(name: object) -> str | None:
    """Why `scheduler.type = name` cannot be honoured; None when it can."""
    module = torch.optim.lr_scheduler
    known = [*OWN_SCHEDULES, *_classes(module, module.LRScheduler)]
    return None if name in known else _unknown("scheduler", name, known)


def named() -> list[Key]:
    """Rows of the table of answers for the names that DeepSpeed knows."""
    rows = [Key(f"optimizer.type: {name}", "honoured", "sharded in every stage") for name in OWN_OPTIMIZERS]
    rows += [Key(f"optimizer.type: {name}", "rejected", NOT_YET) for name in LATER]
    for name in OWN_SCHEDULES:
        summary = (getattr(schedule, name).__doc__ or "").splitlines()[0]
        rows.append(Key(f"scheduler.type: {name}", "honoured", summary))
    return rows


def _classes(module: object, base: type) -> list[str]:
    classes = {name: value for name, value in vars(module).items() if isclass(value) and name[0] != "_"}
    return [name for name, value in classes.items() if issubclass(value, base) and value is not base]


def _unknown(section: str, name: object, known: list[str]) -> str:
    near = get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
    return f"{section}.type = {name!r}: unknown; {hint}"
