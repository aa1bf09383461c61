"""Figures in a card's text are expressions, `{{ state("zero3", 7 * billion, 64) | GB }}`, evaluated when it is loaded.

So a text cannot go stale: change a formula in `refimpl.plan` and every answer changes with it. The expressions come
from the bank's own files and may use the names of `NAMES`, a card's `let` and its drawn numbers.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from refimpl.comm.collectives import chunk_sizes
from refimpl.engine.configuration.batch import MICRO, STEPS, TRAIN, complete
from refimpl.engine.configuration.zero_sections import ZeroOptimization
from refimpl.model.gpt import GPTConfig
from refimpl.optim.loss_scale import DynamicLossScaler
from refimpl.parallel.pipeline.clock import alive, share
from refimpl.parallel.pipeline.partition import balanced
from refimpl.parallel.pipeline.schedules.named import schedule
from refimpl.plan import context, expert, formulas, mixture, time, transformer
from refimpl.zero.flat import ALIGN, round_up
from refimpl.zero.gradients import IN_FLIGHT

PLACEHOLDER = re.compile(r"\{\{(.+?)\}\}", re.DOTALL)
FILTER = re.compile(r"^(.*\S)\s+\|\s+(\w+)\s*$", re.DOTALL)

# name -> (factor, the word that follows the number)
UNITS: dict[str, tuple[float, str]] = {
    "B": (1, "bytes"), "KB": (1e3, "KB"), "MB": (1e6, "MB"), "GB": (1e9, "GB"), "TB": (1e12, "TB"),
    "KiB": (2**10, "KiB"), "MiB": (2**20, "MiB"), "GiB": (2**30, "GiB"),
    "us": (1e-6, "µs"), "ms": (1e-3, "ms"), "s": (1, "s"), "min": (60, "min"), "h": (3600, "h"),
    "days": (86400, "days"), "pct": (1e-2, "%"), "x": (1, "times"),
    "TFLOPs": (1e12, "TFLOP/s"), "TFLOP": (1e12, "TFLOP"), "PFLOP": (1e15, "PFLOP"),
    "billion": (1e9, "billion"), "million": (1e6, "million"), "GBs": (1e9, "GB/s"), "tokens": (1, "tokens"),
    "elements": (1, "elements"), "GPUs": (1, "GPUs"), "ranks": (1, "ranks"), "micro": (1, "micro-batches"),
    "samples": (1, "samples"),
}  # fmt: skip


# Units that suit the amount: the largest that it fills.
LADDERS = {"size": ("B", "KB", "MB", "GB", "TB"), "time": ("us", "ms", "s", "min", "h", "days")}


class BankError(ValueError):
    """A card that cannot be used; the text names the file, the card and what to mend."""


def flat(psi: float) -> formulas.Layout:
    """A layout of `psi` parameters without padding."""
    return formulas.Layout(int(psi), padding=0, buckets=0)


def state(strategy: formulas.Strategy, psi: float, ranks: int, itemsize: int = 2) -> int:
    """Bytes of model state a rank keeps: parameters, gradients, optimizer, master weights."""
    return sum(formulas.memory_bytes(strategy, ranks, itemsize, flat(psi)).values())


def state_of(strategy: formulas.Strategy, what: str, psi: float, ranks: int, itemsize: int = 2) -> int:
    """One class of `state`."""
    return formulas.memory_bytes(strategy, ranks, itemsize, flat(psi))[what]


def per(strategy: formulas.Strategy = "ddp", itemsize: int = 2) -> int:
    """Bytes of model state per parameter when nothing is divided."""
    return state(strategy, 1, 1, itemsize)


def sent(strategy: formulas.Strategy, psi: float, ranks: int, itemsize: int = 2, micro_batches: int = 1) -> int:
    """Bytes of gradients and parameters that a rank sends per step."""
    rows = formulas.traffic(strategy, ranks, itemsize, flat(psi), micro_batches)
    return sum(row.bytes for row in rows if row.tag in ("gradients", "parameters"))


def least_ranks(strategy: formulas.Strategy, psi: float, budget: float, itemsize: int = 2) -> int:
    """The smallest number of ranks at which the model state fits `budget` bytes a rank."""
    fits = (n for n in range(1, 1 << 20) if state(strategy, psi, n, itemsize) <= budget)
    return next(fits)


def accumulation(sequences: int, micro: int, ranks: int) -> int:
    """gradient_accumulation_steps, from the other two of the batch triple."""
    found: int = complete({TRAIN: sequences, MICRO: micro}, ranks)[STEPS]
    return found


def deepspeed_default(key: str) -> Any:
    """DeepSpeed's default of a key of `zero_optimization`."""
    return ZeroOptimization.model_fields[key].default


def scales(overflows: str, **options: Any) -> list[float]:
    """The dynamic loss scale after each step; `overflows` has an x for a step that overflows, a dot for a good one."""
    scaler, seen = DynamicLossScaler(**options), []
    for letter in overflows:
        scaler.update(letter == "x")
        seen.append(scaler.scale)
    return seen


def number(x: float) -> str:
    """Whole numbers as they are, others to three digits, or to a whole one that has more: 0.0123 · 12.3 · 1,235."""
    if isinstance(x, int) or (float(x).is_integer() and abs(x) < 1e6):
        return f"{int(x):,}"
    digits = max(0, 2 - math.floor(math.log10(abs(x))))
    text = f"{x:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


OURS = (
    state, state_of, per, sent, least_ranks, accumulation, deepspeed_default, scales, flat, number, chunk_sizes,
    round_up, GPTConfig, formulas.Layout, transformer.flops_per_token, transformer.activation_bytes,
    transformer.checkpointed_bytes, transformer.tensor_parallel_sent, time.Link, time.ring_all_reduce_seconds,
    time.ring_half_seconds, time.tree_all_reduce_seconds, time.crossover_bytes, time.bubble, time.exposed_seconds,
    time.adam_seconds, time.checkpoint_interval, schedule, share, alive, balanced, context.ring_sent,
    context.ulysses_sent, expert.even_sent, expert.padded_sent, mixture.Mixture,
)  # fmt: skip
PYTHON = (abs, float, int, len, list, max, min, range, round, sum)
CONSTANTS = {
    "million": 10**6, "billion": 10**9, "trillion": 10**12, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "us": 1e-6, "ms": 1e-3, "hour": 3600, "day": 86400, "fp32": 4, "bf16": 2, "fp16": 2,
    "MIXTRAL": mixture.MIXTRAL, "DEEPSEEK_V3": mixture.DEEPSEEK_V3,
    "ALIGN": ALIGN, "IN_FLIGHT": IN_FLIGHT,
}  # fmt: skip
NAMES: dict[str, Any] = {**CONSTANTS, "math": math, **{f.__name__: f for f in (*OURS, *PYTHON)}}


def value(expression: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression. BankError says which one failed and why."""
    try:
        return eval(expression.strip(), {"__builtins__": {}, **NAMES, **names})
    except Exception as error:
        raise BankError(f"cannot evaluate {expression.strip()!r}: {type(error).__name__}: {error}") from error


def bind(let: Mapping[str, str], drawn: Mapping[str, Any]) -> dict[str, Any]:
    """The drawn numbers and a card's own names, each of which may use those before it."""
    names = dict(drawn)
    for name, expression in let.items():
        names[name] = value(expression, names)
    return names


def fill(text: str, names: Mapping[str, Any]) -> str:
    """The text with its figures."""
    return PLACEHOLDER.sub(lambda match: _figure(match[1], names), text).strip()


def _figure(inside: str, names: Mapping[str, Any]) -> str:
    match = FILTER.match(inside)
    if match is None:
        found = value(inside, names)
        return found if isinstance(found, str) else number(found)
    amount, unit = value(match[1], names), match[2]
    if unit in LADDERS:
        unit = [name for name in LADDERS[unit] if UNITS[name][0] <= amount][-1]
    if unit not in UNITS:
        raise BankError(f"{inside.strip()!r}: unit {unit!r} is none of {', '.join([*UNITS, *LADDERS])}")
    factor, word = UNITS[unit]
    return number(amount / factor) + ("" if word == "%" else " ") + word
