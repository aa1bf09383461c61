"""Which numbers of a weight stay: the largest share by a score, one score a number, a row, a head or a channel.

    l1     the score is the size of what it stands for when training begins; the mask stays (arXiv:1506.02626)
    topk   the score is a parameter of its own. Backward takes the mask's derivative for 1, so that a score rises where
           keeping its part lowers the loss (movement pruning, Sanh et al. 2020, arXiv:2005.07683)

A mask of 0 and 1 costs a product a forward and saves nothing: `clean` does, where it takes rows out of one layer and
the columns that they feed out of the next. A score is 4 bytes of parameter, and what its optimizer keeps.
DeepSpeed until 0.19.6: deepspeed/compression/utils.py (TopKBinarizer), basic_layer.py.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from refimpl.compress.weights.grid import straight_through

Part = Literal["number", "row", "head", "channel"]
# How DeepSpeed calls a layer's scores and its fixed mask in a state dict.
NAMES: dict[Part, tuple[str, str]] = {
    "number": ("sparse_mask_scores", "sparse_pruning_mask"),
    "row": ("row_mask_scores", "row_pruning_mask"),
    "head": ("head_pruning_scores", "head_pruning_mask"),
    "channel": ("channel_mask_scores", "channel_pruning_mask"),
}


def largest(scores: Tensor, share: float) -> Tensor:
    """1 for the ceil(share n) largest of n scores, the first of equals, 0 for the others; straight through."""
    kept = math.ceil(share * scores.numel())
    with torch.no_grad():
        order = scores.flatten().sort(descending=True, stable=True).indices
        mask = torch.zeros_like(scores).view(-1).index_fill_(0, order[:kept], 1).view(scores.shape)
    return straight_through(scores, mask)


@dataclass(frozen=True)
class Prune:
    """Keep `share` of a weight's parts from step `offset` on."""

    offset: int
    part: Part
    share: float
    learned: bool  # topk
    heads: int = 1  # in the columns of a weight [out, in], in / heads each

    def at(self, step: int) -> "Prune":
        return self

    def prepare(self, layer: nn.Module) -> None:
        """Give the layer its scores, random, or its mask, by its weight as it is now."""
        weight: Tensor = layer.weight  # type: ignore[assignment]
        scores, mask = NAMES[self.part]
        if self.learned:
            start = torch.empty(self.shape(weight), dtype=weight.dtype, device=weight.device)
            nn.init.kaiming_uniform_(start, a=math.sqrt(5))
            layer.register_parameter(scores, nn.Parameter(start))
        else:
            sizes = weight.detach().abs()
            of_parts = sizes if self.part == "number" else sizes.flatten(1).sum(1).view(self.shape(weight))
            layer.register_buffer(mask, largest(of_parts, self.share))

    def shape(self, weight: Tensor) -> tuple[int, ...]:
        """The scores of this weight."""
        if self.part == "number":
            return tuple(weight.shape)
        return (1, self.heads) if self.part == "head" else (len(weight), *(1 for _ in weight.shape[1:]))

    def kept(self, layer: nn.Module) -> Tensor:
        """The layer's mask of 0 and 1, of its scores' shape and its weight's dtype."""
        scores, mask = NAMES[self.part]
        found: Tensor = largest(getattr(layer, scores), self.share) if self.learned else getattr(layer, mask)
        return found.to(layer.weight.dtype)  # type: ignore[arg-type]

    def __call__(self, layer: nn.Module, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(weight, bias) with zeros in the parts that go. A row's and a channel's bias goes with it."""
        mask = self.kept(layer)
        if self.part == "head":
            mask = mask.repeat_interleave(weight.shape[1] // self.heads, 1)  # [1, in]
        if bias is not None and self.part in ("row", "channel"):
            bias = bias * mask.view(-1)
        return weight * mask, bias

    def forget(self, layer: nn.Module) -> None:
        """Take the layer's scores or mask from it."""
        delattr(layer, NAMES[self.part][0 if self.learned else 1])
