"""What a model may be called with of which nobody gave an example: inputs tried in turn, until a call of a twin works.

    of nn.Embedding(V, ..)     tokens, int64 [2, 8], below V
    of nn.Linear(K, M)         numbers [2, 8, K], then [2, K]
    of the last such layer     classes, int64 [2, 8], then [2], below M

in the order in which the model has its layers, for each argument that its `forward` requires; others are left out. A
warning is an error here: a loss that stretches its target to fit was not meant. What such a call does not reach stays
whole, and `Report` says so; give an example where training calls the model in another way. DeepSpeed needs none, for it
goes by the names of layers: deepspeed/module_inject/auto_tp.py.
"""

import warnings
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.parallel.auto import rehearsal
from refimpl.parallel.auto.trace import plain_layers, tensors
from refimpl.parallel.tensor import how

SEQUENCES, TOKENS = 2, 8
MOST = 3  # required arguments: with more there are too many ways to call it


def guessed(model: nn.Module, call: Callable[[nn.Module, Any], Any]) -> dict[str, Tensor] | None:
    """The first keyword arguments with which call(twin, arguments) gives numbers; None if none does. No collective."""
    required = [
        name
        for name, one in signature(model.forward).parameters.items()
        if one.default is Parameter.empty and one.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    ]
    if not 0 < len(required) <= MOST:
        return None
    twin = rehearsal.make_twin(model)
    for inputs in product(candidates(twin), repeat=len(required)):
        example = dict(zip(required, inputs, strict=True))
        if works(twin, example, call):
            return example
    return None


def candidates(model: nn.Module) -> list[Tensor]:
    """What a layer of the model could be given, each shape and range once."""
    found = dict[tuple[Any, ...], Tensor]()
    layers = list(plain_layers(model).values())
    for layer in layers:
        if isinstance(layer, nn.Embedding):
            found.setdefault(("tokens", layer.num_embeddings), below(layer.num_embeddings, SEQUENCES, TOKENS))
            continue
        width = sizes(layer)[0]
        draw = torch.Generator().manual_seed(0)
        for shape in ((SEQUENCES, TOKENS, width), (SEQUENCES, width)):
            found.setdefault(shape, torch.randn(shape, generator=draw))
    if layers and not isinstance(layers[-1], nn.Embedding):
        classes = sizes(layers[-1])[1]
        found |= {("classes", shape): below(classes, *shape) for shape in ((SEQUENCES, TOKENS), (SEQUENCES,))}
    return list(found.values())


def sizes(layer: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer."""
    weight: Any = layer.weight
    outputs, _ = how(layer)
    return weight.shape[1 - outputs], weight.shape[outputs]


def below(most: int, *shape: int) -> Tensor:
    """0, 1, 2, .. and from 0 again: int64 of this shape."""
    return (torch.arange(torch.Size(shape).numel()) % most).view(shape)


def works(twin: nn.Module, example: Mapping[str, Tensor], call: Callable[[nn.Module, Any], Any]) -> bool:
    """Whether the call gives numbers."""
    with rehearsal.seeded(None), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return bool(tensors(call(twin, example)))
        except Exception:  # whatever a model does with what it does not expect
            return False


def words(example: Mapping[str, Tensor]) -> str:
    """input_ids int64 [2, 8], targets int64 [2, 8]"""
    return ", ".join(f"{name} {str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for name, x in example.items())
