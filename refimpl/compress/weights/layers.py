"""Linear, Conv2d and Embedding that compute with their weight as it is to be: rounded, masked, or both.

A layer of a model becomes one in place: it keeps its parameters and hooks, and changes its class. What is done to it
stands in `techniques`, by DeepSpeed's name of each, in the order in which it is done; one takes effect from its
`offset` on, counted in `step`, which the engine sets. Nothing is done before, nor where no engine counts.
DeepSpeed until 0.19.6: deepspeed/compression/basic_layer.py, whose layers are new ones in the old ones' places.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from refimpl.compress.weights.masks import Prune
from refimpl.compress.weights.quantize import Quantize, QuantizeInput, Rounding

Technique = Quantize | QuantizeInput | Prune
Doing = Rounding | QuantizeInput | Prune
ORDER = (  # what rounds comes before what masks, in forward and when a model is cleaned
    "weight_quantization",
    "sparse_pruning",
    "row_pruning",
    "head_pruning",
    "channel_pruning",
    "activation_quantization",
)


class Compressed(nn.Module):
    """What the three have in common."""

    weight: Tensor
    techniques: dict[str, Technique]
    doing: tuple[Doing, ...]  # in this step. A new one where it changes alone: torch.compile compiles anew for each

    @property
    def step(self) -> int:
        """Of training; -1 before anybody counts."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        doing = tuple(t.at(step) for t in self.techniques.values() if 0 <= t.offset <= step)
        if doing != self.doing:
            self.doing = doing

    def add(self, name: str, technique: Technique) -> None:
        """ValueError if this layer has one of that name."""
        if name in self.techniques:
            raise ValueError(f"{name}: this layer is in two of its groups")
        if not isinstance(technique, Quantize):
            technique.prepare(self)
        self.techniques[name] = technique
        self.change({name: self.techniques[name] for name in ORDER if name in self.techniques})

    def change(self, techniques: dict[str, Technique]) -> None:
        """Do these from now on."""
        self.techniques = techniques
        self.step = self._step

    def now(self) -> tuple[Tensor, Tensor | None]:
        """(weight, bias) that forward computes with."""
        weight = self.weight
        bias: Tensor | None = getattr(self, "bias", None)
        for technique in self.doing:
            if isinstance(technique, Rounding):
                weight = technique(weight)
            elif isinstance(technique, Prune):
                weight, bias = technique(self, weight, bias)
        return weight, bias

    def fed(self, x: Tensor) -> Tensor:
        """The input that forward computes with."""
        for technique in self.doing:
            if isinstance(technique, QuantizeInput):
                x = technique.rounded(self, x)
        return x

    def extra_repr(self) -> str:
        return ", ".join([super().extra_repr(), *self.techniques])


class CompressedLinear(Compressed, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(self.fed(input), *self.now())


class CompressedConv2d(Compressed, nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self._conv_forward(self.fed(input), *self.now())
        return result


class CompressedEmbedding(Compressed, nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        weight, _ = self.now()
        if self.max_norm is not None and weight is not self.weight:
            weight = weight.clone()  # whose rows are made shorter in place
        settings = self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        return F.embedding(input, weight, *settings)


KINDS: dict[type[nn.Module], tuple[type[Compressed], tuple[str, ...]]] = {  # what a kind becomes, and what it can do
    nn.Linear: (
        CompressedLinear,
        ("weight_quantization", "activation_quantization", "sparse_pruning", "row_pruning", "head_pruning"),
    ),
    nn.Conv2d: (
        CompressedConv2d,
        ("weight_quantization", "activation_quantization", "sparse_pruning", "channel_pruning"),
    ),
    nn.Embedding: (CompressedEmbedding, ("weight_quantization",)),
}


def kind(module: nn.Module) -> type[nn.Module] | None:
    """The one of KINDS that a module is; None for others, and where its forward or a parent's would not be ours."""
    if isinstance(module, NonDynamicallyQuantizableLinear):  # whose weight MultiheadAttention reads
        return None
    found = next((base for base in KINDS if isinstance(module, base)), None)
    if found is None or isinstance(module, Compressed):
        return found
    if "weight" not in module._parameters:  # computed from others: weight_norm, torch.nn.utils.prune
        return None
    return found if type(module).forward is found.forward and "forward" not in vars(module) else None


def become(module: nn.Module) -> Compressed:
    """Change the class of a module that has a kind, unless it is one of these already."""
    if isinstance(module, Compressed):
        return module
    base = kind(module)
    assert base is not None
    ours, own = KINDS[base][0], type(module)
    module.__class__ = ours if own is base else both(ours, own)
    assert isinstance(module, Compressed)
    module.techniques, module.doing, module._step = {}, (), -1
    return module


OWN: dict[type[nn.Module], type[Compressed]] = {}  # what `both` has made, by a model's class


def both(ours: type[Compressed], own: type[nn.Module]) -> type[Compressed]:
    """One class for all layers of `own`, a class of the model's. pickle, which finds no name of it, makes it again."""

    def reduce(layer: Compressed) -> tuple[Any, ...]:
        return again, (ours, own), layer.__getstate__()  # type: ignore[no-untyped-call]

    if own not in OWN:
        OWN[own] = type(f"Compressed{own.__name__}", (ours, own), {"__reduce__": reduce})
    return OWN[own]


def again(ours: type[Compressed], own: type[nn.Module]) -> Compressed:
    """A layer of that class, empty: what pickle fills."""
    made = both(ours, own)
    return made.__new__(made)


def smaller(layer: nn.Module, name: str, value: Tensor | None) -> None:
    """Replace a parameter by one of another shape."""
    if value is not None:
        trains = getattr(layer, name).requires_grad
        setattr(layer, name, nn.Parameter(value.detach().clone(memory_format=torch.contiguous_format), trains))
