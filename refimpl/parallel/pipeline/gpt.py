"""The GPT of `refimpl.model.gpt` as a chain of layers: embeddings, each block, norm and head. It is not changed for it.

The head's weight is the token embedding's, the same object, so the pipeline finds that first and last stage share it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refimpl.model.gpt import GPT


class Embeddings(nn.Module):
    """tokens [B, T] -> [B, T, C]."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.wte, self.wpe = model.wte, model.wpe

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        return x


class Head(nn.Module):
    """[B, T, C] -> logits [B, T, V]."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.ln, self.head = model.ln, model.head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.ln(x))
        return logits


def gpt_layers(model: GPT) -> list[nn.Module]:
    """Layers + 2 modules with the model's own parameters, in order."""
    return [Embeddings(model), *model.blocks, Head(model)]


def gpt_names(layers: list[nn.Module]) -> dict[str, str]:
    """What `gpt_layers` are called in the GPT, by their names in a `PipelineModule`."""
    last = len(layers) - 1
    ends = {"0.wte": "wte", "0.wpe": "wpe", f"{last}.ln": "ln", f"{last}.head": "head"}
    return ends | {f"{i}": f"blocks.{i - 1}" for i in range(1, last)}


def gpt_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy, as GPT.forward computes it."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
