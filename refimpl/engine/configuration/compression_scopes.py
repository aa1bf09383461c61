"""Which layers each technique of `compression_training` is for: what its regular expressions find in a model.

Layers are searched for by name, as in DeepSpeed: `attention.self` finds every Linear, Conv2d and Embedding below it. A
layer that computes in its own way stays as it is, with a warning. DeepSpeed until 0.19.6:
deepspeed/compression/compress.py.
"""

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from torch import nn

from refimpl.comm.board import stacklevel
from refimpl.compress.weights.layers import KINDS, ORDER, Technique, kind
from refimpl.compress.weights.masks import Part, Prune
from refimpl.compress.weights.quantize import Quantize, QuantizeInput
from refimpl.engine.configuration.compression_training import CompressionTraining
from refimpl.engine.configuration.keys import ConfigError, ConfigWarning

PARTS: dict[str, Part] = {
    "sparse_pruning": "number",
    "row_pruning": "row",
    "head_pruning": "head",
    "channel_pruning": "channel",
}


@dataclass(frozen=True)
class Scope:
    """One regular expression of a group: what is done to which layers, and which others lose what these do."""

    path: str  # the group's, in the configuration
    method: str
    technique: Technique
    layers: list[str]
    related: list[list[str]]  # by each of the related expressions, as many as `layers`


def scopes(model: nn.Module, config: CompressionTraining) -> Iterator[Scope]:
    """All of them, in the order in which a model is cleaned.

    ConfigError where a layer is in two groups of a technique, or is of a kind that it is not for. ConfigWarning where
    an expression finds none.
    """
    for method in ORDER:
        if (section := config.get(method)) is None:
            continue
        taken: dict[str, str] = {}
        for name, group in section.different_groups.items():
            path = f"compression_training.{method}.different_groups.{name}"
            technique = make(method, section.shared_parameters, group.params)
            if not group.modules:
                tell(f"{path}: modules is empty, so that it is for no layer; left out it is for all")
            for word, related in zip(group.modules, group.related_modules or repeat([]), strict=False):
                layers = found(model, word, path, method)
                for layer in layers:
                    if layer in taken:
                        raise ConfigError(f"{path}: {layer} is in {taken[layer]} already; a layer is in one of them")
                    taken[layer] = name
                others = [named(model, other, path) for other in related]
                for names in others:
                    if names and layers and len(names) != len(layers):  # a model may be without a BatchNorm, say
                        raise ConfigError(f"{path}: {len(layers)} layers are pruned, {len(names)} are related: {names}")
                yield Scope(path, method, technique, layers, others)


def make(method: str, shared: Any, params: Any) -> Technique:
    """A technique as its section describes it."""
    if method == "weight_quantization":
        mixed, whole = shared.fp16_mixed_quantize, shared.quantize_weight_in_forward
        return Quantize(
            shared.schedule_offset,
            params.target_bits,
            params.target_bits if whole else params.start_bits,
            params.quantization_period,
            shared.quantization_type == "symmetric",
            shared.quantize_groups,
            shared.rounding == "stochastic",
            mixed.quantize_change_ratio if mixed.enabled else None,
        )
    if method == "activation_quantization":
        symmetric, static = shared.quantization_type == "symmetric", shared.range_calibration == "static"
        return QuantizeInput(shared.schedule_offset, params.bits, symmetric, static)
    heads = shared.num_heads if method == "head_pruning" else 1
    return Prune(shared.schedule_offset, PARTS[method], params.dense_ratio, shared.method == "topk", heads)


def found(model: nn.Module, word: str, path: str, method: str) -> list[str]:
    """The layers that `word` finds and that can be compressed. `*` finds those that this technique is for."""
    hits = [name for name in named(model, word, path) if not isinstance(model.get_submodule(name), nn.BatchNorm2d)]
    kinds = {name: kind(model.get_submodule(name)) for name in hits}
    own = [name for name, its in kinds.items() if its is None]
    wrong = [name for name, its in kinds.items() if its is not None and method not in KINDS[its][1]]
    if own:
        tell(f"{path}: {own[0]} computes in its own way, and stays as it is")
    if wrong and word != "*":
        what = type(model.get_submodule(wrong[0])).__name__
        raise ConfigError(f"{path}: {word} finds {wrong[0]}, a {what}, which {method} is not for")
    layers = [name for name in hits if name not in own and name not in wrong]
    if not layers:
        remedy = "convert_conv1d_to_linear makes Linear layers of GPT-2's"
        tell(f"{path}: {word} finds no layer that can be compressed; {remedy}")
    return layers


def named(model: nn.Module, word: str, path: str) -> list[str]:
    """Linear, Conv2d, Embedding and BatchNorm2d layers in whose names `word` is found; all of them for `*`.

    One at two places has two names, and goes by the first. What torch.compile adds to a name is not looked at.
    """
    try:
        pattern = re.compile("" if word == "*" else word)
    except re.error as error:
        raise ConfigError(f"{path}: {word!r} is no regular expression: {error}") from None
    every = ((name.replace("_orig_mod.", ""), module) for name, module in model.named_modules(remove_duplicate=False))
    kinds = (*KINDS, nn.BatchNorm2d)
    hits = {module for name, module in every if isinstance(module, kinds) and pattern.search(name)}
    return [name for name, module in model.named_modules() if module in hits]


def tell(note: str) -> None:
    """A warning at the line of the script that led here."""
    warnings.warn(note, ConfigWarning, stacklevel=stacklevel())
