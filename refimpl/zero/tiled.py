"""A linear layer in tiles, which ZeRO-3 gathers one after the other: no rank holds the whole matrix at once.

Memory-centric tiling (ZeRO-Infinity, arXiv:2104.07857, section 5.1.3). With r x c tiles the largest gathered weight is
1/(r c) of the layer's; bytes sent are the same, in r c gathers. DeepSpeed: deepspeed/runtime/zero/tiling.py.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.comm.collectives import chunk_sizes
from refimpl.zero.init import GatheredParameters


class TiledLinear(nn.Module):
    """y = x W^T + b, with W cut into `out_splits` rows and `in_splits` columns of layers of their own.

    x: [..., in_features], or `in_splits` tensors of its columns with `input_is_already_split`. Returns
    [..., out_features], or a list of its `out_splits` parts without `combine_out_splits`. `linear_cls(in, out,
    bias=..., **kwargs)` makes a tile, with a bias in the last column only; `init_linear` is a layer to copy.
    RuntimeError for more tiles than features, or fewer than one. Attributes of DeepSpeed's names: `in_parts`,
    `out_parts`, and `linears[row][column]`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Any = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise RuntimeError(f"TiledLinear: {name}_splits = {splits}: must be 1 to {name}_features = {features}")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        # As `tensor_split` cuts.
        widths, heights = chunk_sizes(in_features, in_splits), chunk_sizes(out_features, out_splits)
        self.in_parts, self.out_parts = [0, *accumulate(widths)], [0, *accumulate(heights)]
        # The bias is added once, with the last column's product.
        biases = [False] * (in_splits - 1) + [bias]
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(width, height, bias=here, **kwargs) for width, here in zip(widths, biases, strict=True)
            )
            for height in heights
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Any:
        """The layer's output, one tile after the other."""
        if isinstance(input_, Tensor):
            columns: Sequence[Tensor] = input_.tensor_split(self.in_splits, dim=-1)
        else:
            columns = input_
        if len(columns) != self.in_splits:
            raise ValueError(f"TiledLinear: {len(columns)} inputs for {self.in_splits} columns of tiles")
        parts = [self.added([tile(x) for tile, x in zip(row, columns, strict=True)]) for row in self.rows()]
        return self.joined(parts) if self.combine_out_splits else parts

    def rows(self) -> list[list[Any]]:
        """The tiles."""
        return [list(row.children()) for row in self.linears]

    def added(self, products: list[Any]) -> Any:
        """A row's part of the output: the sum over its columns."""
        return reduce(torch.add, products)

    def joined(self, parts: list[Any]) -> Any:
        """The output of its rows' parts."""
        return torch.cat(parts, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take the weights of a whole layer, also when the tiles are sharded: then rank 0's count, and all call it."""
        shape = (self.out_features, self.in_features)
        if tuple(other.weight.shape) != shape or (other.bias is not None) != self.use_bias:
            raise ValueError(
                f"TiledLinear: a layer {tuple(other.weight.shape)} with bias {other.bias is not None} cannot fill one "
                f"{shape} with bias {self.use_bias}"
            )
        for number, row in enumerate(self.rows()):
            weights = other.weight.tensor_split(self.out_splits)[number].tensor_split(self.in_splits, dim=1)
            with GatheredParameters([p for tile in row for p in tile.parameters()], modifier_rank=0):
                for tile, weight in zip(row, weights, strict=True):
                    tile.weight.copy_(weight)
                if self.use_bias:
                    row[-1].bias.copy_(other.bias.tensor_split(self.out_splits)[number])


class TiledLinearReturnBias(TiledLinear):
    """For a `linear_cls` that returns (output, bias), as Megatron-LM's layers do; so does this: bias [out_features]."""

    def added(self, products: list[Any]) -> Any:
        """The sum over columns, and the bias of the last one."""
        return super().added([product for product, _ in products]), products[-1][1]

    def joined(self, parts: list[Any]) -> Any:
        """Both joined; the bias is None where no tile has one."""
        biases = [bias for _, bias in parts if bias is not None]
        return super().joined([part for part, _ in parts]), super().joined(biases) if biases else None
