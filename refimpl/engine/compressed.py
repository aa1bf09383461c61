"""`compression_training` meets a model: before training, in it, and after it.

    init_compression -> prepare: layers change their class in place and get their scores and masks
    engine           -> Clock, before a forward and behind an update: the layers hear which step it is
    redundancy_clean -> finish: what was decided becomes the weights

DeepSpeed until 0.19.6: deepspeed/compression/compress.py, scheduler.py. Its steps are not in a checkpoint, so that a
schedule begins anew where training goes on; here they are the updates that the engine has made.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from refimpl.compress.weights.clean import in_own_memory, keep_inputs, keep_outputs, settle, size_of
from refimpl.compress.weights.layers import Compressed, become
from refimpl.compress.weights.masks import Prune
from refimpl.compress.weights.quantize import Quantize
from refimpl.engine.configuration.compression_scopes import Scope, scopes, tell
from refimpl.engine.configuration.compression_training import CompressionTraining
from refimpl.engine.configuration.keys import ConfigError
from refimpl.zero.init import GatheredParameters


def prepare(model: nn.Module, config: CompressionTraining, begun: bool = False) -> None:
    """Make the layers of all scopes ready. ConfigError, before anything has changed, where something is wrong.

    begun: the model's optimizer is made already, and would not learn scores.
    """
    wanted = list(scopes(model, config))
    for scope in wanted:
        if begun and scope.layers and isinstance(scope.technique, Prune) and scope.technique.learned:
            raise ConfigError(f"{scope.path}: topk learns scores: call init_compression before initialize, or write l1")
        for name in scope.layers:
            check(model.get_submodule(name), name, scope)
    refuse_tied(model, wanted)
    for scope in wanted:
        for number, name in enumerate(scope.layers):
            layer, technique = become(model.get_submodule(name)), scope.technique
            if isinstance(technique, Quantize):
                rows = layer.num_embeddings if isinstance(layer, nn.Embedding) else technique.groups
                technique = replace(technique, groups=rows, number=number)
            with GatheredParameters(layer.parameters(recurse=False)):  # a mask is made of all of a weight
                layer.add(scope.method, technique)
    no_shortcuts(model)


def refuse_tied(model: nn.Module, wanted: Iterable[Scope]) -> None:
    """ConfigError where one parameter is the weight of two layers: each would round, or mask, it in its own way."""
    taken: dict[tuple[str, int], str] = {}
    for scope in wanted:
        for name in scope.layers:
            weight = scope.method, id(model.get_submodule(name).weight)
            if (other := taken.setdefault(weight, name)) != name:
                raise ConfigError(f"{scope.path}: {other} and {name} have one weight: name one of them")


def no_shortcuts(model: nn.Module) -> None:
    """In evaluation torch's encoder layers read their Linears' weights, unless their activation is none they know."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(isinstance(m, Compressed) for m in module.children()):
            module.activation_relu_or_gelu = 0


def check(layer: nn.Module, name: str, scope: Scope) -> None:
    """ConfigError where a layer cannot be cut as its technique asks, or has been given it before."""
    weight: Any = layer.weight
    technique = scope.technique
    if isinstance(layer, Compressed) and scope.method in layer.techniques:
        raise ConfigError(f"{scope.path}: {name} has it already: init_compression was called before")
    parts = technique.heads if isinstance(technique, Prune) else getattr(technique, "groups", 1)
    size = weight.shape[1] if isinstance(technique, Prune) else weight.numel()
    if size % parts and not isinstance(layer, nn.Embedding):
        key = "num_heads" if isinstance(technique, Prune) else "quantize_groups"
        raise ConfigError(f"{scope.path}: {key} {parts} does not divide {name}.weight {tuple(weight.shape)}")


@torch.no_grad()
def teach(student: nn.Module, teacher: nn.Module, config: CompressionTraining) -> None:
    """Copy the teacher's layers that are named, in this order, and the other modules. AttributeError if one is not."""
    asked = config.layer_reduction
    layers, pairs = asked.module_name_prefix, [(name, name) for name in asked.other_module_name]
    pairs += [(f"{layers}.{mine}", f"{layers}.{theirs}") for mine, theirs in enumerate(asked.teacher_layer)]
    for mine, theirs in pairs:
        target = dict(student.get_submodule(mine).named_parameters())
        source = dict(teacher.get_submodule(theirs).named_parameters())
        with GatheredParameters([*target.values(), *source.values()], modifier_rank=0):
            for name, parameter in target.items():
                parameter.copy_(source[name])


@dataclass(frozen=True)
class Clock:
    """Tells a model's compressed layers how many updates there have been."""

    model: nn.Module
    config: CompressionTraining

    def __post_init__(self) -> None:
        """ConfigWarning for layers that nobody would tell."""
        if not self.config.active and any(layer.techniques and layer.step < 0 for layer in self.layers()):
            said = "init_compression made layers for it, and the configuration given to initialize has none"
            tell(f"compression_training: {said}: nothing is rounded or masked")

    def tell(self, step: int) -> None:
        if self.config.active:
            for layer in self.layers():
                layer.step = step

    def check(self) -> None:
        """ConfigError, before an update, if the configuration asks for what no layer was made to do."""
        if self.config.active and next(self.layers(), None) is None:
            raise ConfigError(
                "compression_training: no layer of the model is made for it: call init_compression(model, config) "
                "before initialize, or leave the section out"
            )

    def layers(self) -> Iterator[Compressed]:
        return (module for module in self.model.modules() if isinstance(module, Compressed))


def finish(model: nn.Module, config: CompressionTraining) -> None:
    """Make of every layer what its techniques have decided; what has related modules becomes smaller, and these too.

    ConfigError, before anything has changed, where a layer is none that `prepare` made, or cannot be cut so.
    """
    wanted = list(scopes(model, config))
    for scope in wanted:
        for name in scope.layers:
            if not isinstance(model.get_submodule(name), Compressed):
                raise ConfigError(f"{scope.path}: {name} was not made ready: call init_compression before its training")
    refuse_uneven(model, wanted)
    for scope in wanted:
        layers = [model.get_submodule(name) for name in scope.layers]
        kept = [settle(layer, scope.method, bool(scope.related)) for layer in layers if isinstance(layer, Compressed)]
        cut = keep_outputs if scope.method == "head_pruning" else keep_inputs
        for names in scope.related:
            for name, mask in zip(names, kept, strict=False):
                if mask is not None:
                    cut(model.get_submodule(name), mask)
    if any(scope.related for scope in wanted):
        in_own_memory(model)


def refuse_uneven(model: nn.Module, wanted: Iterable[Scope]) -> None:
    """ConfigError where a layer's size, after the cuts before, is no multiple of the parts of which it is to lose some.

    Nor can a grouped convolution be cut: its weight has the channels of one group.
    """
    sizes: dict[tuple[str, int], int] = {}
    for scope in (scope for scope in wanted if scope.related):
        own = 1 if scope.method == "head_pruning" else 0  # the dimension that the layer itself loses some of
        for at, name in enumerate(scope.layers):
            layer: Any = model.get_submodule(name)
            if (technique := layer.techniques.get(scope.method)) is None:  # cleaned already
                continue
            kept = technique.kept(layer)
            for each, dim in [(name, own), *((names[at], 1 - own) for names in scope.related if names)]:
                of = model.get_submodule(each)
                size = sizes.get((each, dim), size_of(of, dim))
                if size % kept.numel() or getattr(of, "groups", 1) > 1:
                    what = f"{each}, a {type(of).__name__} with {size} there"
                    raise ConfigError(f"{scope.path}: {name} has {kept.numel()} parts, and {what}, cannot lose some")
                sizes[each, dim] = size // kept.numel() * int(kept.sum())
