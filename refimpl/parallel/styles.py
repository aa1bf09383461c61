"""What may become of a layer under tensor parallelism, its style, and a plan: pattern of names -> style.

    blocks.*.attention.qkv    Columns(blocks=3, units=heads)   heads are whole, and q, k, v of a head on one rank
    blocks.*.attention.out    Rows(units=heads)
    blocks.*.mlp.up, .down    Columns(), Rows()
    wte, head, loss           Vocabulary(), Columns(), Loss(vocab)

A style is called with the plain layer and returns what takes its place. With `sequence` (sequence parallelism, see
`swap.py`) outside the split layers each rank holds T/N tokens, and what works there, norms and dropout, is divided too.
Parameters that see a rank's own tokens only (`Tokens`: norms; the bias of rows) get a part of their gradient, which a
hook sums over the ranks, 2 n (N-1)/N bytes for n. A module that asks how many tokens it is given, as torchtitan's and
transformers' attention, is `AllTokens`.

torch: torch/distributed/tensor/parallel/style.py. DeepSpeed: deepspeed/module_inject/autotp_config.py,
`partition_config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

from torch import nn

from refimpl.comm.group import Group
from refimpl.parallel.conjugates import gather_sum, reduce, scatter, sum_scatter
from refimpl.parallel.draws import Draws
from refimpl.parallel.summed import sum_gradients
from refimpl.parallel.tensor import ColumnParallelEmbedding, ColumnParallelLinear, Exchange, RowParallelLinear
from refimpl.parallel.vocabulary import VocabParallelEmbedding, VocabParallelLoss


@dataclass(frozen=True)
class Where:
    """What a swap is told beside its layer."""

    name: str
    group: Group
    sequence: bool
    draws: Draws | None
    enter: Exchange  # what brings the input of columns in


@dataclass(frozen=True)
class Columns:
    """-> ColumnParallelLinear."""

    units: int | tuple[int, ...] | None = None
    blocks: tuple[int, ...] | int = 1
    gathered: bool = False
    copies: int = 1

    def __call__(self, plain: nn.Module, at: Where) -> nn.Module:
        return ColumnParallelLinear(
            plain,
            at.group,
            units=self.units,
            blocks=self.blocks,
            copies=self.copies,
            gathered=self.gathered,
            enter=at.enter,
            draws=at.draws,
            name=at.name,
        )


@dataclass(frozen=True)
class EmbeddingColumns:
    """-> ColumnParallelEmbedding."""

    units: int | None = None

    def __call__(self, plain: nn.Module, at: Where) -> nn.Module:
        assert isinstance(plain, nn.Embedding), f"{at.name}: {type(plain).__name__} is no nn.Embedding"
        return ColumnParallelEmbedding(plain, at.group, units=self.units, name=at.name)


@dataclass(frozen=True)
class Rows:
    """-> RowParallelLinear."""

    units: int | None = None

    def __call__(self, plain: nn.Module, at: Where) -> nn.Module:
        leave = sum_scatter if at.sequence else reduce
        layer = RowParallelLinear(plain, at.group, units=self.units, leave=leave, draws=at.draws, name=at.name)
        if at.sequence and layer.bias is not None:
            sum_gradients(layer, ["bias"], at.group)
        return layer


@dataclass(frozen=True)
class Vocabulary:
    """-> VocabParallelEmbedding."""

    def __call__(self, plain: nn.Module, at: Where) -> nn.Module:
        assert isinstance(plain, nn.Embedding), f"{at.name}: {type(plain).__name__} is no nn.Embedding"
        return VocabParallelEmbedding(plain, at.group, leave=sum_scatter if at.sequence else reduce, name=at.name)


@dataclass(frozen=True)
class Loss:
    """A module (logits, targets) -> loss becomes VocabParallelLoss."""

    vocab: int

    def __call__(self, plain: nn.Module, at: Where) -> nn.Module:
        return VocabParallelLoss(self.vocab, at.group, name=at.name)


@dataclass(frozen=True)
class Tokens:
    """Stays; under sequence parallelism it works on this rank's tokens, and its gradients are summed over the ranks."""

    def __call__(self, plain: nn.Module, at: Where) -> nn.Module:
        if at.sequence:
            for module in plain.modules():
                sum_gradients(module, list(module._parameters), at.group)
        return plain


@dataclass(frozen=True)
class ToTokens:
    """Stays; under sequence parallelism this rank's tokens of its output go on: position embeddings, [T, C]."""

    dim: int = 0

    def __call__(self, plain: nn.Module, at: Where) -> nn.Module:
        if at.sequence:
            plain.register_forward_hook(lambda module, args, out: scatter(out, at.group, self.dim))
        return plain


@dataclass(frozen=True)
class AllTokens:
    """Stays; under sequence parallelism all ranks' tokens go into it, and the columns in it take them as they are."""

    def __call__(self, plain: nn.Module, at: Where) -> nn.Module:
        if at.sequence:
            plain.register_forward_pre_hook(partial(_to_all, at.group), with_kwargs=True)
        return plain


def _to_all(group: Group, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The first argument, which transformers' layers give by its name."""
    if args:
        return (gather_sum(args[0], group), *args[1:]), kwargs
    first = next(iter(signature(module.forward).parameters))
    return args, kwargs | {first: gather_sum(kwargs[first], group)}


Style = Columns | EmbeddingColumns | Rows | Vocabulary | Loss | Tokens | ToTokens | AllTokens
Plan = Mapping[str, Style]


def gpt_plan(heads: int, vocab: int) -> Plan:
    """Of `refimpl.model.gpt.GPT`."""
    return {
        "wte": Vocabulary(),
        "wpe": ToTokens(),
        "blocks.*.ln[12]": Tokens(),
        "blocks.*.attention.qkv": Columns(units=heads, blocks=3),
        "blocks.*.attention.out": Rows(units=heads),
        "blocks.*.mlp.up": Columns(),
        "blocks.*.mlp.down": Rows(),
        "ln": Tokens(),
        "head": Columns(),
        "loss": Loss(vocab),
    }
