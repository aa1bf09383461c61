"""Tensor parallelism: a matrix cut by columns, then one cut by rows, and one sum over the ranks behind both.

                    X -- f --+-- Y1 = GELU(X A1) -- Z1 = Y1 B1 --+-- g -- Z = Z1 + Z2 (+ bias)
                             +-- Y2 = GELU(X A2) -- Z2 = Y2 B2 --+

Cut by columns, A = [A1, A2], each rank computes some features of Y, whole ones, so that GELU can be applied at once.
(Cut by rows, X A = X1 A1 + X2 A2 would have to be summed before: GELU of a sum is not the sum of GELUs.) B is then cut
by rows, where rank i holds what multiplies the features it has, and one all-reduce (g) sums the parts. In backward the
mirror image: X went to all ranks, so the gradients that come back are summed (f). Attention is the same with heads in
place of GELU: q, k and v by columns, heads whole, the output projection by rows.

Memory: 1/N of each cut matrix, its gradient, its optimizer state and the activations between f and g, on each rank; a
row layer's bias is whole on all. Traffic a layer of a transformer and step: 4 all-reduces of B T C elements, two in
forward (g), two in backward (f), each in the critical path.

Against the uncut layer. A column layer's outputs are dot products of the same numbers: `torch.equal` wherever the
matrix kernel adds them in the same order (on CPUs, where each rank's part is a multiple of 16 features). A row layer
cuts the dot product itself, and a sum of parts rounds in another order: any two orders of a sum of K products differ
by at most 2 K eps sum |x w| (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). It equals, bit for
bit, one process that adds the same N parts in rank order.

Shoeybi et al. 2019, arXiv:1909.08053, section 3. Megatron-LM: megatron/core/tensor_parallel/layers.py. DeepSpeed:
deepspeed/module_inject/layers.py, `LinearLayer` (columns) and `LinearAllreduce` (rows).

    K   inputs of a layer    M   outputs    N   ranks
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.parallel.conjugates import copy, gather, reduce, scatter
from refimpl.parallel.draws import Draws
from refimpl.parallel.overlap import Coming
from refimpl.parallel.split import Split

Multiply = Callable[..., Tensor]  # (x [.., K], weight, bias [M]) -> [.., M]
Exchange = Callable[[Tensor, Group], Tensor]  # one of the conjugates


class Parted(nn.Module):
    """A layer that holds a part of some parameters. `splits`: parameter name -> (how it is split, along which dim)."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group
        self.splits: dict[str, tuple[Split, int]] = {}

    def keep(self, name: str, whole: Tensor | None, split: Split | None = None, dim: int = 0) -> None:
        """Register this rank's part of a plain layer's parameter, a copy, so that the whole can go; or all of it.

        Of a whole that all have drawn by the same seed the parts are the plain model's weights at any number of ranks.
        """
        if whole is None or split is None:
            self.register_parameter(name, None if whole is None else nn.Parameter(whole.detach(), whole.requires_grad))
            return
        self.splits[name] = split, dim
        self.register_parameter(
            name, nn.Parameter(split.part(whole.detach(), self.group.rank, dim), whole.requires_grad)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A twin with parameters of its own, on the same group."""
        memo[id(self.group)] = self.group
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__ = deepcopy(self.__dict__, memo)
        return twin


def cuts(model: nn.Module) -> dict[nn.Parameter, tuple[Split, int, Group]]:
    """Every parameter of which this rank has a part -> (split, dimension, group), under whatever names it goes."""
    return {
        getattr(layer, key): (split, dim, layer.group)
        for layer in model.modules()
        if isinstance(layer, Parted)
        for key, (split, dim) in layer.splits.items()
    }


class ColumnParallelLinear(Parted):
    """Y_i = X A_i: each rank has some of the outputs."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        plain: Any,  # nn.Linear or Conv1D
        group: Group,
        *,
        units: int | tuple[int, ...] | None = None,
        blocks: tuple[int, ...] | int = 1,
        copies: int = 1,
        gathered: bool = False,
        enter: Exchange = copy,
        draws: Draws | None = None,
        name: str = "column-parallel layer",
    ) -> None:
        """From an `nn.Linear`, or a layer like it, that is equal on all ranks: each keeps its part.

        `units`: outputs are dealt out in that many equal pieces, such as heads (default: one by one). `blocks`: their
        number or their sizes, where several matrices lie side by side in one, as in a fused qkv; `units` may be one a
        block. `copies`: ranks that have the same outputs of blocks with fewer units than ranks, keys and values of few
        heads; see `swap.sum_copies`. `gathered`: return all outputs. `enter`: what brings the input in. `draws`: see
        `draws.py`. ValueError if it cannot be dealt out.
        """
        super().__init__(group)
        outputs_dim, self.multiply = how(plain)
        outputs = plain.weight.shape[outputs_dim]
        sizes = (outputs // blocks,) * blocks if isinstance(blocks, int) else blocks
        if sum(sizes) != outputs:
            raise ValueError(f"{name}: {outputs} outputs are not blocks of {blocks}")
        if gathered and copies > 1:
            raise ValueError(f"{name}: outputs that are gathered are one of a kind: copies must be 1, not {copies}")
        self.split = Split(sizes, sizes if units is None else units, group.size, name, copies)
        if outputs_dim and self.split.copied(0) not in ([], [slice(0, self.split.sizes[0])]):
            raise ValueError(f"{name}: outputs of which some are copied must be the weight's first dimension")
        self.gathered, self.enter, self.draws = gathered, enter, draws
        self.leave: Exchange = partial(gather, split=self.split) if gathered else local
        self.keep("weight", plain.weight, self.split, outputs_dim)
        self.keep("bias", plain.bias, self.split)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., K] -> [.., M/N], or [.., M] if gathered."""
        whole = self.enter(x, self.group)
        multiply = partial(self.multiply, weight=self.weight, bias=self.bias)
        y: Tensor = whole.through(multiply) if isinstance(whole, Coming) else multiply(whole)
        if self.draws is not None and not self.gathered:
            self.draws.enter()
        return self.leave(y, self.group)


class RowParallelLinear(Parted):
    """Y = sum over ranks of X_i A_i, + bias: each rank has some of the inputs."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        plain: Any,  # nn.Linear or Conv1D
        group: Group,
        *,
        units: int | None = None,
        scattered: bool = True,
        leave: Exchange = reduce,
        draws: Draws | None = None,
        name: str = "row-parallel layer",
    ) -> None:
        """As for `ColumnParallelLinear`. `scattered`: x is this rank's part of the inputs; else all of them, equal on
        all ranks. `leave`: what sums the parts. The bias is whole on every rank, and added once, to the sum."""
        super().__init__(group)
        outputs_dim, self.multiply = how(plain)
        inputs = plain.weight.shape[1 - outputs_dim]
        self.split = Split((inputs,), inputs if units is None else units, group.size, name)
        self.inputs, self.name = self.split.sizes[group.rank], name
        self.scattered, self.leave, self.draws = scattered, leave, draws
        self.keep("weight", plain.weight, self.split, 1 - outputs_dim)
        self.keep("bias", plain.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., K/N] (or [.., K]) -> [.., M], the same on all ranks."""
        if self.draws is not None:
            self.draws.leave()
        if not self.scattered:
            x = scatter(x, self.group, split=self.split)
        if x.shape[-1] != self.inputs:
            raise ValueError(
                f"{self.name}: {x.shape[-1]} features come in, and this rank's rows are {self.inputs}: under sequence "
                "parallelism a module that reads the length of its input is AllTokens() in the plan"
            )
        y = self.leave(self.multiply(x, self.weight, None), self.group)
        return y if self.bias is None else y + self.bias


class ColumnParallelEmbedding(Parted):
    """Each rank has some of the features of every row: T5's position bias, which has a feature a head."""

    weight: nn.Parameter

    def __init__(self, plain: nn.Embedding, group: Group, *, units: int | None = None, name: str = "embedding") -> None:
        super().__init__(group)
        refuse_options(plain, name)
        self.split = Split((plain.embedding_dim,), units or plain.embedding_dim, group.size, name)
        self.keep("weight", plain.weight, self.split, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [..] -> [.., M/N]."""
        return F.embedding(ids, self.weight)


def how(plain: Any) -> tuple[int, Multiply]:
    """The dimension of the weight that has the outputs, and how the layer multiplies.

    A layer may have a way of its own, `multiply(x, weight, bias)`. Hugging Face's Conv1D is a linear layer whose weight
    is [K, M].
    """
    if type(plain).__name__ == "Conv1D":
        return 1, _transposed
    if not isinstance(plain, nn.Linear):
        raise TypeError(f"{type(plain).__name__} is no linear layer: expected nn.Linear, or Hugging Face's Conv1D")
    return 0, getattr(plain, "multiply", F.linear)


def _transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.t(), bias)


def refuse_options(plain: nn.Embedding, name: str) -> None:
    """What an embedding does beside looking up."""
    if plain.max_norm is not None or plain.scale_grad_by_freq or plain.sparse:
        raise ValueError(f"{name}: an embedding with max_norm, scale_grad_by_freq or sparse cannot be split")


def local(x: Tensor, group: Group) -> Tensor:
    """No exchange: x is already as the layer needs it."""
    return x
