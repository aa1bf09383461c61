"""Optimizers and schedules by name: DeepSpeed's own, then any class of torch.optim or torch.optim.lr_scheduler.

Optimizers are read in any case ("adamw"), schedules as they are spelt; DeepSpeed does the same with its own names.
DeepSpeed's functions: `_configure_basic_optimizer`, `_scheduler_from_config` in deepspeed/runtime/engine.py.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from inspect import isclass, signature
from typing import Any

import torch
from torch.optim import Optimizer

from refimpl.engine.configuration.arguments import flag
from refimpl.engine.configuration.keys import ConfigError, Key
from refimpl.engine.configuration.quote import quote
from refimpl.engine.heads import BY_HEADS
from refimpl.optim import schedule
from refimpl.optim.adam import Adam
from refimpl.optim.lamb import Lamb
from refimpl.optim.lion import Lion
from refimpl.optim.muon import Muon
from refimpl.optim.one_bit_adam import OneBitAdam
from refimpl.optim.one_bit_lamb import OneBitLamb
from refimpl.optim.zero_one_adam import ZeroOneAdam

ONE_BIT = {"onebitadam": OneBitAdam, "zerooneadam": ZeroOneAdam, "onebitlamb": OneBitLamb}
BUILT: Mapping[str, Callable[..., Optimizer]] = {"lion": Lion, "lamb": Lamb, "muon": Muon, **ONE_BIT}
OWN_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lion", "SGD", "Lamb", "Muon", "OneBitAdam", "ZeroOneAdam", "OneBitLamb")
OWN_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
MUP = {"MuAdam": torch.optim.Adam, "MuAdamW": torch.optim.AdamW, "MuSGD": torch.optim.SGD}  # of the package mup
DEEPSPEED_OPTIMIZERS = {name.lower() for name in (*OWN_OPTIMIZERS, *MUP)} - {"sgd"}  # as runtime/config.py lists them


def optimizer_problem(name: object) -> str | None:
    """Why `optimizer.type = name` cannot be honoured; None when it can."""
    if not isinstance(name, str):
        return f"optimizer.type = {quote(name)}: must be text; one of {', '.join(OWN_OPTIMIZERS)}"
    known = [*OWN_OPTIMIZERS, *MUP, *_classes(torch.optim, torch.optim.Optimizer)]
    return None if name.lower() in (one.lower() for one in known) else _unknown("optimizer", name, known)


def schedule_problem(name: object) -> str | None:
    """Why `scheduler.type = name` cannot be honoured; None when it can."""
    if not isinstance(name, str):
        return f"scheduler.type = {quote(name)}: must be text; one of {', '.join(OWN_SCHEDULES)}"
    module = torch.optim.lr_scheduler
    known = [*OWN_SCHEDULES, *_classes(module, module.LRScheduler)]
    return None if name in known else _unknown("scheduler", name, known)


def optimizer_named(name: str, params: Mapping[str, Any]) -> tuple[Callable[..., Optimizer], dict[str, Any]]:
    """The class and its arguments, with DeepSpeed's defaults where DeepSpeed has the name.

    Lion's, which are not its paper's, are a rate of 1e-3 and betas of 0.9 and 0.999.
    "Adam" is AdamW unless adam_w_mode is false, and its weight_decay is 0 unless `torch_adam` asks for torch's 0.01.
    Both are fused: same formula, same bits on any cut at a multiple of 64 elements, ten times faster on a CPU.
    `bias_correction` false is the one thing that torch's Adam lacks.
    """
    options, kind = dict(params), name.lower()
    if kind == "muon":
        options.pop(BY_HEADS, None)  # said of parameters: see heads.py
    if kind == "lion":
        options = {"lr": 1e-3, "betas": (0.9, 0.999)} | options
    if kind in BUILT:
        return BUILT[kind], options
    if (mup := next((one for one in MUP if one.lower() == kind), None)) is not None:
        return _of_mup(mup), options
    if kind not in ("adam", "adamw"):
        return next(c for c in _classes(torch.optim, Optimizer).values() if c.__name__.lower() == kind), options
    switches = {
        switch: flag(f"optimizer.params.{switch}", options.pop(switch, default))
        for switch, default in {"adam_w_mode": True, "torch_adam": False, "bias_correction": True}.items()
    }
    decoupled = switches["adam_w_mode"] or kind == "adamw"
    if not switches["bias_correction"]:
        if switches["torch_adam"]:
            raise ConfigError("optimizer.params.bias_correction = False: torch's Adam corrects; leave torch_adam out")
        return Adam, options | {"adam_w_mode": decoupled, "bias_correction": False}
    if not switches["torch_adam"]:
        options = {"weight_decay": 0.0} | options
    if not any(options.get(other) for other in ("foreach", "differentiable")):  # torch runs one of the three
        options = {"fused": True} | options
    return (torch.optim.AdamW if decoupled else torch.optim.Adam), options


def schedule_named(name: str) -> Callable[..., Any]:
    """A class of `refimpl.optim.schedule`, else of torch."""
    found: Callable[..., Any] = getattr(schedule, name, None) or getattr(torch.optim.lr_scheduler, name)
    return found


def named() -> list[Key]:
    """Rows of the table of answers for the names that DeepSpeed knows."""
    apart = "stage 0, as in DeepSpeed: after its warm-up one bit an element travels in the gradients' place"
    rows = [
        Key(f"optimizer.type: {name}", "honoured", apart if name.lower() in ONE_BIT else "sharded in every stage")
        for name in OWN_OPTIMIZERS
    ]
    rows += [Key(f"optimizer.type: {name}", "honoured", "the package mup's, where it is installed") for name in MUP]
    for name in OWN_SCHEDULES:
        summary = (getattr(schedule, name).__doc__ or "").splitlines()[0]
        rows.append(Key(f"scheduler.type: {name}", "honoured", summary))
    return rows


def _classes(module: object, base: type) -> dict[str, Any]:
    classes = {name: value for name, value in vars(module).items() if isclass(value) and name[0] != "_"}
    return {name: value for name, value in classes.items() if issubclass(value, base) and value is not base}


def _of_mup(name: str) -> Callable[..., Optimizer]:
    """mup's function, which makes torch's optimizer: rates by the widths that `mup.set_base_shapes` has noted."""
    try:
        make: Any = partial(getattr(import_module("mup"), name))
    except ImportError:
        raise ConfigError(f"optimizer.type = {quote(name)}: needs the package mup; pip install mup") from None
    make.__name__, make.__signature__ = name, signature(MUP[name])
    return make  # type: ignore[no-any-return]


def _unknown(section: str, name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
    return f"{section}.type = {quote(name)}: unknown; {hint}"
