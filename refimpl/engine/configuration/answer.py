"""Walk a raw configuration and give every key its answer: keep it, drop it with a warning, or reject it by name.

All problems are collected and raised together, so that a file is mended in one go. DeepSpeed checks only its pydantic
sections and accepts unknown keys at the top and in activation_checkpointing in silence.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Number
from types import NoneType
from typing import Any

import torch
from pydantic import BaseModel

from refimpl.engine.configuration.keys import ConfigError, Key, not_honoured
from refimpl.engine.configuration.quote import quote
from refimpl.engine.names import named, optimizer_problem, schedule_problem

Table = Mapping[str, Key]


def _offload_if(on: Any) -> dict[str, str]:
    return {"device": "cpu" if on and on != "auto" else "none"}


# Deprecated spelling -> (today's spelling in the same section, today's value). Both at once is an error.
RENAMED: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "bfloat16": ("bf16", lambda value: value),
    "fp32_allreduce": ("communication_data_type", lambda on: "fp32" if on else None),  # GPT-NeoX's files still say so
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "stage3_gather_16bit_weights_on_model_save",
        lambda value: value,
    ),
    "zero_optimization.cpu_offload": ("offload_optimizer", _offload_if),
    "zero_optimization.cpu_offload_param": ("offload_param", _offload_if),
    "zero_optimization.cpu_offload_use_pin_memory": ("offload_optimizer", lambda on: {"pin_memory": on}),
}
# The names of DeepSpeed's fields, accepted beside the names of its documentation: zero_optimization.NAME is read as
# zero_optimization.stage3_NAME. Both at once is an error.
UNPREFIXED = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
    "max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold "
    "use_all_reduce_for_fetch_params allgather_sequential"
)
ALIASES = {f"zero_optimization.{name}": f"stage3_{name}" for name in UNPREFIXED.split()}
ALIASES["elasticity.prefer_large_batch"] = "prefer_larger_batch"  # so in DeepSpeed's documentation, unread by its code
# TRL, and accelerate once, write these at the top for a model that is not trained. DeepSpeed reads none; what they say
# is a size, and changes no result. Any other path as a key is an error.
DOTTED = tuple(
    f"zero_optimization.{name}"
    for name in ("reduce_bucket_size", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size")
)
COMMENTS = ("_", "//", "#")  # how people begin a key that is a comment, JSON having none; DeepSpeed reads no such key
TECHNIQUES = "compression_training"  # whose sections are not read unless they are switched on
VALUES = (str, Number, list, tuple, set, Mapping, NoneType, torch.dtype)
# Arguments of a class, which arguments.py beside this file reads, and a plan that `parallel.auto.partition` reads.
FREE = ("optimizer.params", "scheduler.params", "tensor_parallel.partition_config")


def table(model: type[BaseModel]) -> dict[str, Key]:
    """All known keys by full path: the fields of `model`, then the keys that are not honoured."""
    deprecated = [
        Key(path, "warned", f"deprecated spelling of {name}, which gets its own answer")
        for path, (name, _) in RENAMED.items()
    ]
    keys = {key.path: key for key in [*_fields(model), *not_honoured(), *deprecated, *named()]}
    for path, name in ALIASES.items():
        long = keys[f"{path.rpartition('.')[0]}.{name}"]
        keys[path] = Key(path, long.verdict, f"another spelling of {long.path}", long.silent)
    return keys


def markdown(keys: Table) -> str:
    """The table for people."""
    lines = ["| key | answer | reason | silent for |", "| --- | --- | --- | --- |"]
    for path in sorted(keys):
        key = keys[path]
        silent = ", ".join(f"`{value!r}`" for value in key.silent)
        reason = f"read only with {key.needs}" if key.needs else key.reason
        lines.append(f"| `{path}` | {key.verdict} | {reason} | {silent} |")
    return "\n".join(lines)


def answer(raw: Mapping[str, Any], keys: Table) -> tuple[dict[str, Any], list[str]]:
    """The honoured part of `raw`, and one note for each key that is accepted without effect. Raises `ConfigError`."""
    walk = _Walk(keys)
    values = walk.section(_modern_zero(raw, walk.notes), "")
    for name, check in (("optimizer", optimizer_problem), ("scheduler", schedule_problem)):
        given = values.get(name)
        problem = check(given["type"]) if isinstance(given, Mapping) and "type" in given else None
        walk.problems += [problem] if problem else []
    if walk.problems:
        raise ConfigError("\n".join(walk.problems))
    return values, walk.notes


@dataclass
class _Walk:
    keys: Table
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @cached_property
    def sections(self) -> set[str]:
        """The paths below which keys stand."""
        return {path.rpartition(".")[0] for path in self.keys} | set(FREE)

    def section(self, given: Mapping[str, Any], prefix: str, rows: str = "") -> dict[str, Any]:
        """The honoured part of one section; `prefix` is its path and a dot, or empty at the top.

        rows: the same as the table has it, `*` standing where the user chooses a name; unset: `prefix`.
        """
        kept, rows = {}, rows or prefix
        for name, value in self.modern(self.plain(given, prefix), prefix).items():
            path = f"{prefix}{name}"
            plain = "." not in name and ":" not in name
            key = self.keys.get(f"{rows}{name}", self.keys.get(f"{rows}*")) if plain else None
            if key is None:
                if prefix.removesuffix(".") in FREE:
                    kept[name] = value
                elif not prefix and name in DOTTED:
                    self.notes.append(f"{name}: no effect: DeepSpeed reads no key with a dot; write it in its section")
                elif prefix or not name.startswith(COMMENTS):
                    self.problems.append(f"{path}: unknown key{_nearest(name, rows, self.keys)}")
            elif key.path in self.sections:
                inner = self.inside(key, value, path)
                if key.verdict == "honoured" and inner is not None:
                    kept[name] = inner
            elif key.verdict == "honoured":
                kept[name] = value
            elif not self.is_unread(key, given):
                self.refuse(key, value)
        return kept

    def is_unread(self, key: Key, section: Mapping[str, Any]) -> bool:
        """Whether the switch beside a key is off. Where the switch itself is rejected, that says enough."""
        off = section.get(key.needs.rpartition(".")[2]) in (None, False, "none", "auto")
        return bool(key.needs) and (off or self.keys[key.needs].verdict == "rejected")

    def plain(self, given: Mapping[Any, Any], prefix: str) -> dict[str, Any]:
        """`given` without what no JSON file holds: a problem each. An optimizer's rate may be a tensor."""
        free, kept = prefix.removesuffix(".") in FREE, {}
        for name, value in given.items():
            if not isinstance(name, str):
                self.problems.append(f"{prefix}{quote(name)}: a key is text")
            elif free and isinstance(value, Mapping):
                self.problems.append(f"{prefix}{name} = {quote(value)}: must not be an object")
            elif free or isinstance(value, VALUES):
                kept[name] = value
            else:
                self.problems.append(f"{prefix}{name}: a {type(value).__name__} is nothing that a JSON file holds")
        return kept

    def inside(self, key: Key, value: Any, path: str) -> dict[str, Any] | None:
        """The honoured part of the section `value`; None for one that is not there, spelt null, or no section."""
        if isinstance(value, Mapping):
            technique = key.path.rpartition(".")[0] == TECHNIQUES
            return {} if technique and not _on(value) else self.section(value, f"{path}.", f"{key.path}.")
        if value is not None and not any(value is silent for silent in key.silent):
            asked = f"{key.reason}; " if key.verdict == "rejected" else ""
            self.problems.append(f"{path} = {quote(value)}: {asked}a section is an object, {{...}}")
        return None

    def refuse(self, key: Key, value: Any) -> None:
        """A warning or a problem, unless `value` asks for nothing; "auto" is DeepSpeed's default."""
        if _off(value) or value in ("auto", *key.silent):
            return
        line = f"{key.path} = {quote(value)}: {key.reason}"
        if key.verdict == "warned":
            self.notes.append(f"{line}; the key has no effect")
        else:
            self.problems.append(line)

    def modern(self, given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """`given` with today's spelling of its deprecated keys, and one spelling of those that have two."""
        modern = {n: value for n, value in given.items() if f"{prefix}{n}" not in (*RENAMED, *ALIASES)}
        for name, value in given.items():
            path = f"{prefix}{name}"
            if path in RENAMED:
                today, translate = RENAMED[path]
                new = translate(value)
                self.notes.append(f"{path}: deprecated; write {prefix}{today}")
            elif path in ALIASES:
                today, new = ALIASES[path], value
            else:
                continue
            both = modern.get(today)
            if isinstance(new, Mapping) and isinstance(both, Mapping) and not new.keys() & both.keys():
                new = {**new, **both}
            elif today in modern:
                self.problems.append(f"{path} and {prefix}{today} mean the same key; keep the second")
            modern[today] = new
        return modern


def _modern_zero(raw: Mapping[str, Any], notes: list[str]) -> Mapping[str, Any]:
    """`"zero_optimization": true` is the oldest spelling of stage 1."""
    zero = raw.get("zero_optimization")
    if not isinstance(zero, bool):
        return raw
    notes.append(f'zero_optimization = {zero}: deprecated; write {{"stage": {int(zero)}}}')
    return {**raw, "zero_optimization": {"stage": int(zero)}}


def _fields(model: type[BaseModel], prefix: str = "") -> list[Key]:
    rows = []
    for name, info in model.model_fields.items():
        rows.append(Key(f"{prefix}{name}", "honoured", info.description or ""))
        kinds = [info.annotation, *getattr(info.annotation, "__args__", ())]
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        below = f"{prefix}{name}."
        if inner and getattr(info.annotation, "__origin__", None) is dict:  # whose keys the user chooses
            rows.append(Key(f"{below}*", "honoured", "a name of one's choice"))
            below += "*."
        rows += _fields(inner, below) if inner else []
    return rows


def _off(section: Any) -> bool:
    """Whether a section of somebody else's keys is switched off, or all the switches inside it are."""
    if not isinstance(section, Mapping):
        return False
    inside = [value for value in section.values() if isinstance(value, Mapping) and _switches(value)]
    return section.get("enabled") is False or (bool(inside) and all(map(_off, inside)))


def _on(technique: Mapping[str, Any]) -> bool:
    shared = technique.get("shared_parameters", technique)
    return not isinstance(shared, Mapping) or bool(shared.get("enabled"))


def _switches(section: Mapping[str, Any]) -> bool:
    return "enabled" in section or any(_switches(value) for value in section.values() if isinstance(value, Mapping))


def _nearest(name: str, prefix: str, keys: Table) -> str:
    """What to do: write the key of this section that is spelt almost so, else one of another section, else none.

    A key that is right elsewhere stands in the wrong section, whatever this one has that looks like it.
    """
    here = [path.removeprefix(prefix) for path in keys if path.startswith(prefix)]
    own = [key for key in here if "." not in key and ":" not in key]
    elsewhere = {path.rsplit(".", 1)[-1]: path for path in keys if not path.endswith(".enabled")}  # whose switch?
    near = difflib.get_close_matches(name, own, n=1, cutoff=0.65)  # pipe is pipeline, and mesh is not timers
    if near and name not in elsewhere:
        return f"; did you mean {near[0]}?"
    if f"{prefix}params" in FREE:
        return f"; the arguments of its class stand in {prefix}params"
    near = difflib.get_close_matches(name, list(elsewhere), n=1, cutoff=0.8)
    if not near:
        return "; DeepSpeed has none of this name: take it out"
    there = elsewhere[near[0]]
    return f"; did you mean {there}{'' if '.' in there or not prefix else ', at the top level'}?"
