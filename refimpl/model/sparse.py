"""Attention over the blocks that a layout names: the function, and a module's attention made of a pattern.

Work and memory are the layout's density times dense attention's (`blocked.py` has the formulas). On a GPU with Triton
the kernel in refimpl/kernels/ runs, where no bias is given; everywhere else `blocked.py`.
DeepSpeed until 0.19.6: deepspeed/ops/sparse_attention/sparse_self_attention.py.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.model.blocked import BlockSparse, Problem
from refimpl.model.patterns.base import SparsityConfig
from refimpl.model.tiles import Plan

FIRST = 2048  # tokens that a layout is made for, at first: max_seq_length of DeepSpeed's SparseSelfAttention


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Tensor | Plan,
    block: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    key_bias: Tensor | None = None,
    biases: Sequence[Tensor] = (),
) -> Tensor:
    """softmax(scale q k^T + biases) v over the blocks of `layout`: [B, H, T_q, D], in q's dtype.

    q [B, H, T_q, D], k and v [B, K, T_k, D], K dividing H (queries of H/K heads share a head of keys). layout: of
    T_q / block x T_k / block blocks, alone, by head, or by sequence and head; or a `Plan` of it, which is made once and
    kept. causal: a token sees none after it, the last query and the last key being one token
    (of a `Plan`, as it says itself). scale: 1 / sqrt(D). key_bias [B, T_k] and each of biases [T_q, T_k],
    [1 or H, T_q, T_k] or [1 or B, 1 or H, T_q, T_k] are added to scores; -inf forbids. q, k, v and biases get
    gradients. A row that may read nothing gives zeros.

    ValueError where shapes do not fit, or `block` does not divide the length.
    """
    plan = layout if isinstance(layout, Plan) else Plan(layout, causal, (k.shape[2] - q.shape[2]) // max(1, block))
    fits(q, k, v, plan, block)
    wide = [spread(bias, q, k) for bias in biases]
    if key_bias is not None and key_bias.shape != (q.shape[0], k.shape[2]):
        raise ValueError(f"key_bias has shape {tuple(key_bias.shape)}, not [batch, keys]: {(q.shape[0], k.shape[2])}")
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    if plan.full and not wide and key_bias is None and (not plan.causal or q.shape[2] == k.shape[2]):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=plan.causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    if not wide and key_bias is None and q.is_cuda and by_kernel(q, k, v, plan, block):
        from refimpl.kernels import block_sparse_attention as kernel  # which a CPU has no use for

        return kernel.block_sparse_attention(q, k, v, plan.for_kernel(q.device), block, causal=plan.causal, scale=scale)
    if key_bias is not None:
        key_bias = key_bias.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    problem = Problem(q, k, plan, block, scale, key_bias)
    mixed: Tensor = BlockSparse.apply(  # type: ignore[no-untyped-call]
        problem, q, k, v, *wide
    )
    return mixed


def by_kernel(q: Tensor, k: Tensor, v: Tensor, plan: Plan, block: int) -> bool:
    """Whether Triton's kernel takes this call on a GPU: blocks and heads it knows, one layout for all sequences."""
    from refimpl.kernels.block_sparse_attention import BLOCKS
    from refimpl.kernels.flash_shapes import WIDEST
    from refimpl.kernels.language import takes

    aligned = not plan.causal or plan.first == plan.shape[1] - plan.shape[0]
    known = block in BLOCKS and q.shape[3] <= WIDEST
    return known and takes(q, k, v) and plan.by_sequence is None and aligned


def fits(q: Tensor, k: Tensor, v: Tensor, plan: Plan, block: int) -> None:
    """ValueError unless these can be attended."""
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: give [batch, heads, tokens, width] each"
        )
    if q.dtype != k.dtype or q.dtype != v.dtype or not q.is_floating_point():
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: give one floating-point dtype")
    if k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} heads of queries do not share {k.shape[1]} heads of keys evenly")
    for name, x, n in (("queries", q, plan.shape[0]), ("keys", k, plan.shape[1])):
        if block < 1 or x.shape[2] % block:
            raise ValueError(
                f"{x.shape[2]} {name} are not a multiple of the block size {block}: pad them (`pad_tokens`)"
            )
        if x.shape[2] // block != n:
            raise ValueError(f"{x.shape[2]} {name} are {x.shape[2] // block} blocks of {block}, the layout has {n}")
    if plan.by_sequence not in (None, q.shape[0]) or (
        plan.heads != (1 if plan.heads == 1 else q.shape[1]) * (plan.by_sequence or 1)
    ):
        raise ValueError(
            f"a layout of {plan.heads // (plan.by_sequence or 1)} heads for {q.shape[1]} heads of queries, "
            f"of {plan.by_sequence or 'any number of'} sequences for {q.shape[0]}"
        )


def spread(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A bias with all four dimensions. ValueError if it cannot be one of these scores."""
    wide = bias.reshape((1,) * (4 - bias.dim()) + bias.shape) if bias.dim() <= 4 else bias
    batch, heads, t_q, t_k = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    if (
        wide.dim() != 4
        or wide.shape[0] not in (1, batch)
        or wide.shape[1] not in (1, heads)
        or wide.shape[2:] != (t_q, t_k)
    ):
        raise ValueError(f"a bias {tuple(bias.shape)} does not fit scores {(batch, heads, t_q, t_k)}")
    return wide.contiguous()


def pad_tokens(x: Tensor, block: int, before: int = 0) -> Tensor:
    """x [B, H, T, D] with `before` zeros before it, and zeros behind it up to a multiple of `block` tokens."""
    return F.pad(x, (0, 0, before, -(before + x.shape[2]) % block))


class SparseAttention:
    """A pattern as a model's attention: any length, padding inside, and keys that were kept from before.

    The layout is made for FIRST tokens, or twice as many as often as needed, but not beyond `max_length`; a shorter
    sequence uses its upper left part, as DeepSpeed's do. A plan is made for each length that is met, and kept.
    causal: token i sees keys up to i, whatever the pattern says.
    """

    def __init__(self, pattern: SparsityConfig, max_length: int | None, causal: bool) -> None:
        self.pattern, self.block, self.causal, self.max_length = pattern, pattern.block, causal, max_length
        self.layouts: dict[int, Tensor] = {}
        self.plans: dict[tuple[int, int], Plan] = {}

    def layout(self, end: int) -> Tensor:
        """The pattern over `end` blocks or more, of one head if all are alike: any number may share it."""
        tokens = FIRST
        while tokens < end * self.block:
            tokens *= 2
        n = -(-min(tokens, self.max_length or tokens) // self.block)
        if n not in self.layouts:
            made = self.pattern.make_layout(n * self.block)
            self.layouts[n] = made if self.pattern.different_layout_per_head else made[:1]
        return self.layouts[n]

    def plan(self, first: int, end: int) -> Plan:
        """Of the rows [first, end) of blocks over the columns [0, end)."""
        if (first, end) not in self.plans:
            self.plans[first, end] = Plan(self.layout(end)[:, first:end, :end], self.causal, first)
        return self.plans[first, end]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """q [B, H, T_q, D] are the last T_q of the T_k tokens of k, v [B, K, T_k, D]: -> [B, H, T_q, D].

        key_mask: [B, T_k], zero where a key is padding. ValueError for more than `max_length` tokens.
        """
        (t_q, t_k), block = (q.shape[2], k.shape[2]), self.block
        if t_q > t_k or (self.max_length is not None and t_k > self.max_length):
            raise ValueError(
                f"{t_q} queries over {t_k} keys: the queries must be the last of at most {self.max_length} tokens"
            )
        first = (t_k - t_q) // block
        before = t_k - t_q - first * block
        bias = None
        if key_mask is not None or (t_k % block and not self.causal):
            seen = torch.ones(q.shape[0], t_k, device=q.device) if key_mask is None else key_mask
            bias = torch.zeros(seen.shape, device=q.device).masked_fill(seen == 0, -torch.inf)
            bias = F.pad(bias, (0, -t_k % block), value=-torch.inf)
        keys, values, queries = pad_tokens(k, block), pad_tokens(v, block), pad_tokens(q, block, before)
        plan = self.plan(first, keys.shape[2] // block)
        out = block_sparse_attention(queries, keys, values, plan, block, scale=scale, key_bias=bias)
        return out[:, :, before : before + t_q]
