r"""DeepSpeed's `tensor_parallel.partition_config`: patterns of parameter names -> how their layers are cut.

    {"layer_specs": [{"patterns": [".*\\.o_proj\\.weight$"], "partition_type": "row"},
                     {"patterns": [".*\\.[qkv]_proj\\.weight$"], "partition_type": "column"},
                     {"patterns": [".*\\.gate_up_proj\\.weight$"], "partition_type": "column", "shape": [2, -1]},
                     {"patterns": [".*\\.router\\.weight$"], "partition_type": "skip"}]}

    autotp(model, group, example, plan=partition_plan(model, partition_config))

As in DeepSpeed a regular expression must match from the beginning of "NAME.weight", the first one that matches counts,
and layers that none matches stay whole, or are refused with "strict_mode". Unlike DeepSpeed `autotp` rehearses
it: heads are not cut in the middle, `num_heads` and its like are divided where it is needed, and a plan that computes
something else is an error. `grad_allreduce` is found out, so it is read and not needed. An embedding is cut by tokens
(DeepSpeed: by features). DeepSpeed: deepspeed/module_inject/autotp_config.py.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from refimpl.parallel.auto.trace import plain_layers, unlike
from refimpl.parallel.styles import Columns, Rows, Style, Vocabulary

SPEC = {"patterns": list, "partition_type": str, "shape": list, "partition_dim": int, "model_types": list,
        "gather_output": bool, "grad_allreduce": bool}  # fmt: skip
CONFIG = {"layer_specs": list, "strict_mode": bool, "use_default_specs": bool, "tp_size": int,
          "embedding_partition_dim": int, "lm_head_patterns": list}  # fmt: skip
MAY_BE_NONE = ("shape", "partition_dim", "model_types")
KINDS = {list: "a list", str: "a word", int: "a whole number", bool: "true or false"}


def partition_plan(model: nn.Module, config: Mapping[str, Any]) -> dict[str, Style] | None:
    """A plan by full names; None without `layer_specs`, and then it is to be found. ValueError, with the specification,
    for what is not understood or matches nothing."""
    check_keys("partition_config", config, CONFIG)
    specs = [Spec(number, spec, model) for number, spec in enumerate(config.get("layer_specs", []))]
    plan, layers = dict[str, Style](), plain_layers(model)
    for name, layer in layers.items():
        matching = [spec for spec in specs if spec.matches(f"{name}.weight")]  # all are asked: each notes its matches
        spec = matching[0] if matching else None
        if spec is None and config.get("strict_mode", False) and not isinstance(layer, nn.Embedding):
            raise ValueError(f"strict_mode, and no layer_specs match {name}.weight")
        style = spec.style(layer) if spec else None
        if style is not None:
            plan[name] = style
    for spec in specs:
        if spec.concerns and not spec.used and spec.kind != "skip":
            raise ValueError(f"no layer matches {spec.where}; {spec.near(model) or 'layers are ' + ', '.join(layers)}")
    return plan if specs else None


class Spec:
    """One of `layer_specs`."""

    def __init__(self, number: int, spec: Mapping[str, Any], model: nn.Module) -> None:
        check_keys(f"layer_specs[{number}]", spec, SPEC)
        self.patterns: Sequence[str] = spec.get("patterns", [])
        self.where = f"layer_specs[{number}] {self.patterns}"
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except (TypeError, re.error) as error:
                raise ValueError(f"{self.where}: {pattern!r} is no regular expression: {error}") from None
        self.kind = spec.get("partition_type", "column").lower()
        if self.kind not in ("column", "row", "skip"):
            raise ValueError(f"{self.where}: partition_type is {self.kind!r}: it must be column, row or skip")
        types = [str(kind).lower() for kind in spec.get("model_types") or []]
        model_type = str(getattr(getattr(model, "config", None), "model_type", None)).lower()
        self.concerns = not types or model_type in types
        self.gathered, self.blocks, self.used = spec.get("gather_output", False), self.packed(spec), False

    def packed(self, spec: Mapping[str, Any]) -> tuple[int, ...] | int:
        """`shape`: [3, -1] is three equal blocks, [[q, k, v], -1] three of these sizes."""
        shape, dim = spec.get("shape"), spec.get("partition_dim")
        usual = 0 if self.kind == "column" else 1
        if dim not in (None, usual) or (shape is not None and (self.kind != "column" or len(shape) != 2)):
            raise ValueError(f"{self.where}: shape {shape}, partition_dim {dim}: only a column's outputs have blocks")
        if shape is None:
            return 1
        blocks = tuple(shape[0]) if isinstance(shape[0], list | tuple) else (shape[0],)
        if not blocks or not all(type(n) is int and n > 0 for n in blocks) or type(shape[1]) is not int:
            raise ValueError(f"{self.where}: shape {shape}: it must be [3, -1], three equal blocks, or [[q, k, v], -1]")
        return blocks if isinstance(shape[0], list | tuple) else blocks[0]

    def near(self, model: nn.Module) -> str:
        """Of a matrix that it matches and that is no layer's: why not."""
        found = ((name, p) for name, p in model.named_parameters() if p.dim() > 1 and self.matches(name))
        return next((f"{name} is {unlike(model.get_submodule(name.rpartition('.')[0]), p)}" for name, p in found), "")

    def matches(self, parameter: str) -> bool:
        found = self.concerns and any(re.match(pattern, parameter) for pattern in self.patterns)
        self.used |= found
        return found

    def style(self, layer: nn.Module) -> Style | None:
        if self.kind == "skip":
            return None
        if isinstance(layer, nn.Embedding):
            return Vocabulary()
        return Rows() if self.kind == "row" else Columns(blocks=self.blocks, gathered=self.gathered)


def check_keys(where: str, given: Any, known: Mapping[str, type]) -> None:
    """ValueError for what is no object, has a key that is not known, or a value of another kind than the key's."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} is {given!r}: it must be an object, with keys {', '.join(sorted(known))}")
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"{where}: {', '.join(unknown)} is no key of it; its keys are {', '.join(sorted(known))}")
    for key, value in given.items():
        kind = list if isinstance(value, tuple) else type(value)
        if kind is not known[key] and not (value is None and key in MAY_BE_NONE):
            raise ValueError(f"{where}: {key} is {value!r}: it must be {KINDS[known[key]]}")
