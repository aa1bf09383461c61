"""What training has decided, made permanent: weights on their grid, zeros in place, and rows that are gone taken out.

A row of zeros in one layer feeds zeros to one column of the next: with both taken out the two layers answer as before,
where what stands between them maps 0 to 0 (ReLU, GELU, dropout), and are smaller by the share that was pruned. Heads go
out of the columns of an attention's output and the rows of its queries, keys and values; channels out of a
convolution, its normalisation and the inputs of the next. How many heads there are the model must be told.
DeepSpeed until 0.19.6: deepspeed/compression/compress.py (redundancy_clean), basic_layer.py (fix_*).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.compress.weights.layers import Compressed, smaller
from refimpl.compress.weights.masks import Prune
from refimpl.compress.weights.quantize import Quantize, QuantizeInput


@torch.no_grad()
def settle(layer: Compressed, name: str, shrink: bool = False) -> Tensor | None:
    """Do technique `name` to the layer's numbers, once and for all. -> which parts it kept, bool, of a Prune.

    shrink: take the other parts out, rather than leave zeros. Inputs are rounded in forward for good.
    """
    technique = layer.techniques.get(name)
    left = {other: each for other, each in layer.techniques.items() if other != name}
    if isinstance(technique, QuantizeInput):
        layer.change({**left, name: replace(technique, offset=0)})
        layer.step = max(0, layer.step)
    if isinstance(technique, Quantize):
        layer.weight.copy_(technique.at_last(layer.weight))
        layer.change(left)
    if not isinstance(technique, Prune):
        return None
    kept = technique.kept(layer).view(-1).bool()
    if not shrink:
        weight, bias = technique(layer, layer.weight, getattr(layer, "bias", None))
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)  # type: ignore[operator]
    elif technique.part == "head":
        keep_inputs(layer, kept)
    else:
        keep_outputs(layer, kept)
    technique.forget(layer)
    layer.change(left)
    return kept


@torch.no_grad()
def keep_outputs(layer: nn.Module, kept: Tensor) -> None:
    """Keep the rows [parts of equal size] of a Linear's weight [out, in] and its bias; or a Conv2d's, a BatchNorm's."""
    if isinstance(layer, nn.BatchNorm2d):
        for name in ("weight", "bias", "running_mean", "running_var"):
            _keep(layer, name, kept, 0)
        layer.num_features = int(kept.sum())
        return
    outputs = _keep(layer, "weight", kept, 0)
    _keep(layer, "bias", kept, 0)
    setattr(layer, "out_channels" if isinstance(layer, nn.Conv2d) else "out_features", outputs)


@torch.no_grad()
def keep_inputs(layer: nn.Module, kept: Tensor) -> None:
    """Keep the columns [parts of equal size] of a Linear's weight [out, in], or the input channels of a Conv2d's."""
    if isinstance(layer, nn.BatchNorm2d):
        keep_outputs(layer, kept)
        return
    inputs = _keep(layer, "weight", kept, 1)
    setattr(layer, "in_channels" if isinstance(layer, nn.Conv2d) else "in_features", inputs)


def size_of(layer: nn.Module, dim: int) -> int:
    """Outputs (dim 0) or inputs (dim 1) of a layer; a BatchNorm's are the same."""
    weight: Any = layer.weight
    return layer.num_features if isinstance(layer, nn.BatchNorm2d) else int(weight.shape[dim])


def _keep(layer: nn.Module, name: str, kept: Tensor, dim: int) -> int:
    """How many are left, of what is there. ValueError if it cannot be cut into that many parts."""
    value: Tensor | None = getattr(layer, name, None)
    if value is None:
        return 0
    size, parts = value.shape[dim], len(kept)
    if size % parts or getattr(layer, "groups", 1) > 1:
        raise ValueError(f"{name} {tuple(value.shape)} of a {type(layer).__name__} cannot lose some of {parts} parts")
    where = kept.to(value.device).repeat_interleave(size // parts)
    cut = value.index_select(dim, where.nonzero().view(-1))
    if isinstance(value, nn.Parameter):
        smaller(layer, name, cut)
    else:
        setattr(layer, name, cut)
    return cut.shape[dim]


def in_own_memory(model: nn.Module) -> None:
    """New parameters for those that are views of a stage's buffers: a view keeps all of its buffer, in a file too."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if p.untyped_storage().nbytes() > p.nbytes:
                new.setdefault(p, nn.Parameter(p.detach().clone(), p.requires_grad))
                setattr(module, name, new[p])
