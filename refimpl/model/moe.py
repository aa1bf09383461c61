"""A mixture of experts: instead of one MLP many, of which each token passes through k.

    y = sum over its k routes of weight x expert(x)   (+ shared(x), which every token passes through)

With E experts it has about E times the parameters of the MLP for k times its FLOPs. Tokens move in two permutations:

    permute    [T, M] -> [R, M]     rows sorted by expert: each expert multiplies one block    k T M read and written
    combine    [R, M] -> [T, M]     a token's k answers, weighted and added in fp32            k T M read, T M written

and backward is the other one each. Nothing is computed for a slot that is empty. Each of them adds in the order of a
token's routes and never in that of the rows, so results do not depend on where, or in which order, rows were computed.
On a GPU, where nothing is dropped, they are `refimpl/kernels/permute.py`.

PR-MoE (Rajbhandari et al. 2022, arXiv:2201.05596, section 4.1): a residual MLP beside the experts, mixed by a learned
coefficient; and more experts in later layers (`mixtures` with a number a block). Shared experts: DeepSeekMoE, Dai et
al. 2024, arXiv:2401.06066. The permutations: MegaBlocks, Gale et al. 2022, arXiv:2211.15841. DeepSpeed:
deepspeed/moe/layer.py.

Nothing here knows of other ranks: `mix` is what `refimpl/parallel/expert/` puts its own in place of.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.model.experts import Experts
from refimpl.model.gates import Gate, Routing
from refimpl.model.gpt import GPT, Block
from refimpl.model.routes import Routes, Rows

# Several experts: rows [R, M] that are sorted by (source, expert), sizes[source][expert] of them -> [R, M]
Many = Callable[[Tensor, Sequence[Sequence[int]]], Tensor]
Mix = Callable[[Many, Tensor, Routes], Tensor]  # experts, tokens [T, M], routes -> [T, M]


def mix(experts: Many, x: Tensor, routes: Routes) -> Tensor:
    """Every expert is here. x [T, M] -> [T, M]."""
    rows = routes.rows
    return combine(experts(permute(x, rows), [rows.sizes]), rows, routes.weights)


def mix_dense(experts: Many, x: Tensor, routes: Routes) -> Tensor:
    """The same as GShard has it, with one-hot matrices: for comparison. Experts compute empty slots too."""
    rows = torch.einsum("tec,tm->ecm", routes.dispatch().to(x.dtype), x)  # [E, C, M]
    answers = experts(rows.flatten(0, 1), [[routes.capacity] * routes.experts]).view_as(rows)
    return torch.einsum("tec,ecm->tm", routes.combine(), answers.float()).to(x.dtype)


def permute(x: Tensor, rows: Rows) -> Tensor:
    """x [T, M] -> [R, M]: the token of each row."""
    if x.is_cuda and rows.all_kept:
        return by_kernels(x, rows)
    result: Tensor = Permute.apply(x, rows)  # type: ignore[no-untyped-call]
    return result


def combine(y: Tensor, rows: Rows, weights: Tensor) -> Tensor:
    """y [R, M], weights [T, k] fp32 -> [T, M] in y's dtype."""
    if y.is_cuda and rows.all_kept:
        return by_kernels(y, rows, weights)
    result: Tensor = Combine.apply(y, weights, rows)  # type: ignore[no-untyped-call]
    return result


def by_kernels(x: Tensor, rows: Rows, weights: Tensor | None = None) -> Tensor:
    """`permute`, or `combine` if there are weights, in one launch; of routes that are all kept."""
    from refimpl.kernels import permute as kernels  # which a CPU has no use for

    order = kernels.Order(rows.place.int(), rows.counts.int())
    return kernels.permute(x, order) if weights is None else kernels.unpermute(x, order, weights)


class Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return (one_more(x) if rows.padded else x).index_select(0, rows.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return of_tokens(grads[0], ctx.rows).sum(1), None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, rows: Rows) -> Tensor:
        ctx.save_for_backward(y, weights)
        ctx.rows = rows
        return (of_tokens(y, rows) * weights[:, :, None]).sum(1).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (y, weights), rows, grad = ctx.saved_tensors, ctx.rows, grads[0]
        weight_grad = (of_tokens(y, rows).to(weights.dtype) * grad[:, None]).sum(2)  # [T, k]
        by_route = weights.reshape(-1, 1)
        if rows.padded:
            grad, by_route = one_more(grad), one_more(by_route)
        mine = grad.index_select(0, rows.tokens) * by_route.index_select(0, rows.route)  # [R, M]
        return mine.to(y.dtype), weight_grad, None


def of_tokens(y: Tensor, rows: Rows) -> Tensor:
    """y [R, M] -> [T, k, M]: the row of each route, 0 where it was dropped."""
    if not rows.all_kept:
        y = one_more(y)
    return y.index_select(0, rows.place.flatten()).view(*rows.place.shape, y.shape[1])


def one_more(x: Tensor) -> Tensor:
    """x [n, M] -> [n + 1, M], the last row 0."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])])


class MoE(nn.Module):
    """A gate and its experts, with what every token passes through beside them."""

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        *,
        shared: nn.Module | None = None,
        shared_gate: nn.Module | None = None,
        residual: nn.Module | None = None,
        width: int | None = None,
    ) -> None:
        """gate: tokens [T, M] -> `Routes`. experts: see `Many`. shared_gate: [.., M] -> [.., 1], whose sigmoid weights
        the shared expert. residual: PR-MoE's MLP; then `width` M is needed, for the coefficient.
        """
        super().__init__()
        self.gate, self.experts = gate, experts
        self.shared, self.shared_gate, self.residual = shared, shared_gate, residual
        if residual is not None and width is None:
            raise ValueError("a residual MoE needs the width of its tokens: MoE(..., residual=mlp, width=M)")
        self.coefficient = nn.Linear(width, 2) if residual is not None and width is not None else None
        self.mix: Mix = mix
        self.routes: Routes | None = None  # of the last call: for its losses, and to look at

    def forward(self, x: Tensor, used: Tensor | None = None) -> Tensor:
        """x [.., M] -> [.., M]; used: [..] or [T], 0 for tokens that no expert gets."""
        flat = x.reshape(-1, x.shape[-1])  # [T, M]
        routes: Routes = self.gate(flat, None if used is None else used.flatten())
        self.routes = routes
        y = self.mix(self.experts, flat, routes).view_as(x)
        if self.shared is not None:
            shared: Tensor = self.shared(x)
            y = y + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())
        if self.residual is not None and self.coefficient is not None:
            share = self.coefficient(x).softmax(-1)  # [.., 2]
            y = y * share[..., :1] + self.residual(x) * share[..., 1:]
        return y

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which take no tensor that has a graph."""
        return {**self.__dict__, "routes": None}


def layers(model: nn.Module) -> list[MoE]:
    """Every mixture of experts in `model`."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def routing_loss(mixtures: Iterable[MoE], balance: float = 1e-2, z: float = 0.0) -> Tensor:
    """What to add to the loss: the load-balance loss and the z-loss of their last calls. 0 without any."""
    routes = [layer.routes for layer in mixtures if layer.routes is not None]
    return sum((balance * r.balance + z * r.z for r in routes), torch.zeros(()))


class WithRouting(nn.Module):
    """A model's loss module, plus the losses of its mixtures."""

    def __init__(self, loss: nn.Module, mixtures: Iterable[MoE], balance: float, z: float) -> None:
        super().__init__()
        self.loss, self.balance, self.z = loss, balance, z
        self.mixtures = tuple(mixtures)  # no nn.ModuleList: they are the model's

    def forward(self, *args: Any) -> Tensor:
        """The arguments of `loss` -> a scalar."""
        loss: Tensor = self.loss(*args)
        added = self.added(self.mixtures)
        return loss if added is None else loss + added

    def added(self, mixtures: Sequence[MoE]) -> Tensor | None:
        """What the last calls of these add to the loss, a scalar; None for nothing, as in evaluation.

        RuntimeError for one that was called without gradients.
        """
        if not self.training or not mixtures or (self.balance == 0 and self.z == 0):
            return None
        if torch.is_grad_enabled() and not all(has_gradient(layer) for layer in mixtures):
            raise RuntimeError(
                "a mixture of experts was called without gradients, as an activation checkpoint does: its load-balance "
                "loss would train nothing. Checkpoint what is around the mixtures, or set balance=0 and z=0"
            )
        return routing_loss(mixtures, self.balance, self.z)


def has_gradient(layer: MoE) -> bool:
    """Whether the losses of its last call can train its gate."""
    learns = any(p.requires_grad for p in layer.gate.parameters())
    return layer.routes is None or layer.routes.z.requires_grad or not learns


def mixtures(
    model: GPT,
    experts: int | Sequence[int],
    routing: Routing | None = None,
    *,
    every: int = 1,
    upcycle: bool = False,
    shared: bool = False,
    residual: bool = False,
    balance: float = 1e-2,
    z: float = 0.0,
) -> GPT:
    """The MLP of every `every`-th block becomes a mixture, from outside. The same object.

    experts: for all, or one number a mixture (PR-MoE's pyramid). upcycle: experts begin as copies of the MLP
    (Komatsuzaki et al. 2022, arXiv:2212.05055), else each draws its own weights. shared, residual: the MLP stays,
    beside them. balance, z: of the losses that training adds to the model's. ValueError for another number of mixtures.
    """
    blocks = [block for block in model.blocks if isinstance(block, Block)][every - 1 :: every]
    counts = [experts] * len(blocks) if isinstance(experts, int) else list(experts)
    if len(counts) != len(blocks) or not blocks:
        raise ValueError(f"experts={experts} for {len(blocks)} mixtures in {len(model.blocks)} blocks")
    width = model.config.width
    for block, count in zip(blocks, counts, strict=True):
        mlp = block.mlp
        copies = [copy.deepcopy(mlp) if upcycle else anew(mlp) for _ in range(count)]
        beside = {"shared": mlp if shared else None, "residual": mlp if residual else None}
        layer = MoE(Gate(width, count, routing), Experts(copies), width=width, **beside)
        block.mlp = layer.to(next(mlp.parameters()))  # type: ignore[assignment]
    model.loss = WithRouting(model.loss, layers(model), balance, z)
    return model


def anew(module: nn.Module) -> nn.Module:
    """A copy that has drawn its own initial weights."""
    other = copy.deepcopy(module)
    for part in other.modules():
        if callable(reset := getattr(part, "reset_parameters", None)):
            reset()
    return other
