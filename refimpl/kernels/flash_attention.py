"""FlashAttention: softmax(q k^T) v whose scores are made, used and forgotten a tile at a time, never written to memory.

Naive attention writes T^2 scores a head and reads them back for the softmax and for the product with v: at 16k tokens
512 MiB a head in bf16. Here a block of BLOCK_M queries stays on the chip while all keys and values stream past it.

    B   batch     H   heads of q     G   heads of q that share a head of k and v
    T   queries   S   keys           D   head width, at most 256     P   pairs (query, key) that see each other

Bytes, for elements of e bytes:
    forward     q once, out once, lse 4 B H T; k and v once for each block of queries: 2 B H D e x (keys that it sees)
    backward    delta: g and out once. Keys' kernel: k, v, dk, dv once, q and g once for each block of keys and head;
                queries' kernel: q, g, dq once, k and v once for each block of queries
From the second block on, k and v come out of the L2 cache: 16k tokens of one head at D = 128 are 8 MiB in bf16.
FLOPs: forward 4 B H P D, backward 10 B H P D asked for, 14 done (see flash_backward). Causal: P = T (T + 1) / 2.
The limit is the matrix unit: at BLOCK_M = 128 a tile does 256 FLOPs for each element of k and v that it loads. Then the
exponentials come, 1 for each 4 D FLOPs: an H100 does 16 a clock and SM, and 4096 FLOPs, so at D = 128 they take half as
long as the products and have to hide behind them.

Sequences of T queries and S keys end together: query i stands beside key i + S - T, as in FlashAttention from 2.1 on (a
step of decoding is T = 1). torch's is_causal lets them begin together; the two agree where T = S.

Not run on a GPU by its authors: the tiles are torch FlexAttention's for an H100, the rest was checked under Triton's
interpreter and by compiling for sm_80, 86, 90, 100 and 120. Dao et al. 2022 (arXiv:2205.14135), Dao 2023
(arXiv:2307.08691).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from refimpl.kernels.case import Case, short
from refimpl.kernels.checks import autocast, tensors, whole
from refimpl.kernels.flash_backward import flash_backward
from refimpl.kernels.flash_forward import flash_forward
from refimpl.kernels.flash_shapes import Shapes, check_heads, check_scale, reach, readable
from refimpl.kernels.language import on, once_differentiable, takes


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    causal: bool = False, window: tuple[int, int] | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """q [B, H, T, D], k and v [B, H / G, S, D] -> [B, H, T, D] in q's dtype (fp32, bf16, fp16; on a CPU also fp64).

    causal: a query sees its own place and what came before. window (left, right): it sees `left` places before its own
    and `right` after; -1 means all. scale: of the scores, 1 / sqrt(D) by default. A query that sees nothing gets zeros.
    Any strides are taken; where the elements of a head are not side by side, a copy is made.
    """
    q, k, v = autocast(q, k, v)
    check_heads("flash_attention", q, k, v)
    left, right = reach(causal, window)
    scale = check_scale(scale, q.shape[3])
    if min(q.numel(), k.numel()) == 0 or not takes(q, k, v):
        return reference(q, k, v, left, right, scale)
    with on(q):
        out: Tensor = Flash.apply(q, k, v, Shapes.of(q, k, left, right, scale))  # type: ignore[no-untyped-call]
    return out.view(q.shape[0], q.shape[2], *out.shape[1:]).transpose(1, 2)


def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *,
    longest_q: int | None = None, longest_k: int | None = None,
    causal: bool = False, window: tuple[int, int] | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Sequences of unlike lengths, one after the other without padding: q [tokens, H, D] -> [tokens, H, D].

    starts_q, starts_k int32 [sequences + 1] (cu_seqlens): sequence n has the queries starts_q[n] .. starts_q[n + 1] and
    the keys starts_k[n] .. starts_k[n + 1], of k and v [tokens_k, H / G, D]; either may be none. longest_q, longest_k:
    the longest sequence's length, or more; on a GPU its absence costs a wait for the device. ValueError, on a CPU, for
    starts or lengths that do not fit.
    """
    q, k, v = autocast(q, k, v)
    check_heads("flash_attention_varlen", q, k, v, dims=3)
    check_starts(starts_q, starts_k, q, k, longest_q, longest_k)
    left, right = reach(causal, window)
    scale = check_scale(scale, q.shape[2])
    if min(q.numel(), k.numel()) == 0 or not takes(q, k, v):
        return reference_varlen(q, k, v, starts_q, starts_k, left, right, scale)
    queries = int(starts_q.diff().max()) if longest_q is None else min(longest_q, len(q))
    keys = int(starts_k.diff().max()) if longest_k is None else min(longest_k, len(k))
    sizes = (len(q), len(k), queries, keys, left, right, scale, starts_q.contiguous(), starts_k.contiguous())
    with on(q):
        shapes = Shapes(len(starts_q) - 1, q.shape[1], q.shape[1] // k.shape[1], q.shape[2], *sizes)
        out: Tensor = Flash.apply(q, k, v, shapes)  # type: ignore[no-untyped-call]
    return out


def check_starts(
    starts_q: Tensor, starts_k: Tensor, q: Tensor, k: Tensor, longest_q: int | None, longest_k: int | None
) -> None:
    """Raise unless the starts fit the tokens; on a GPU their values are the caller's word: reading them would wait."""
    tensors("flash_attention_varlen", starts_q=starts_q, starts_k=starts_k)
    if starts_q.ndim != 1 or starts_q.shape != starts_k.shape or len(starts_q) < 2:
        found = f"{list(starts_q.shape)} and {list(starts_k.shape)}"
        raise ValueError(f"starts_q and starts_k must both be [sequences + 1] for at least one sequence, not {found}")
    for which, starts, x, longest in (("q", starts_q, q, longest_q), ("k", starts_k, k, longest_k)):
        name = f"starts_{which}"
        if starts.dtype != torch.int32 or starts.device != x.device:
            raise TypeError(f"{name} must be int32 on {x.device}, not {starts.dtype} on {starts.device}")
        if starts.is_cpu and (starts[0] != 0 or starts[-1] != len(x) or (starts.diff() < 0).any()):
            raise ValueError(f"{name} is {starts.tolist()}: it must rise from 0 to the {len(x)} tokens given")
        if longest is not None:
            whole("flash_attention_varlen", **{f"longest_{which}": longest})
            if starts.is_cpu and longest < (there := int(starts.diff().max())):
                raise ValueError(f"longest_{which} is {longest}, but a sequence has {there} tokens")


def visible(queries: int, keys: int, left: int, right: int, device: torch.device) -> Tensor:
    """-> [queries, keys] bool: who sees whom."""
    place = torch.arange(queries, device=device)[:, None] + keys - queries
    key = torch.arange(keys, device=device)
    sees = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if left >= 0:
        sees &= key >= place - left
    if right >= 0:
        sees &= key <= place + right
    return sees


def reference(q: Tensor, k: Tensor, v: Tensor, left: int, right: int, scale: float) -> Tensor:
    """torch's own attention, which on a CPU is a flash attention too; the shapes of `flash_attention`."""
    queries, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if q.numel() == 0 or k.numel() == 0:  # zeros that know their inputs
        return q.masked_fill(torch.ones((), dtype=torch.bool, device=q.device), 0) + k.sum() + v.sum()
    options: dict[str, Any] = {"scale": scale, "enable_gqa": group > 1}
    if queries == keys and (left, right) == (-1, 0):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    if (left, right) == (-1, -1):
        return F.scaled_dot_product_attention(q, k, v, **options)
    sees = visible(queries, keys, left, right, q.device)
    out = F.scaled_dot_product_attention(q, k, v, sees | ~sees.any(1, keepdim=True), **options)
    return torch.where(sees.any(1)[:, None], out, 0)  # with no key at all a softmax is nan


def reference_varlen(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, left: int, right: int, scale: float
) -> Tensor:
    """`reference`, a sequence at a time; the shapes of `flash_attention_varlen`."""
    at_q, at_k = starts_q.tolist(), starts_k.tolist()
    outs = []
    for sequence in range(len(at_q) - 1):
        mine, theirs = slice(*at_q[sequence : sequence + 2]), slice(*at_k[sequence : sequence + 2])
        one, *others = (x.transpose(0, 1)[None] for x in (q[mine], k[theirs], v[theirs]))  # [1, H, T, D]
        outs.append(reference(one, others[0], others[1], left, right, scale)[0].transpose(0, 1))
    return torch.cat(outs)


class Flash(torch.autograd.Function):
    """The kernels and their backward; out is [tokens, H, D] whatever the layout of q."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, shapes: Shapes) -> Tensor:
        q, k, v = readable(q), readable(k), readable(v)
        out, lse = flash_forward(q, k, v, shapes)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.shapes = shapes
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = flash_backward(g.contiguous(), q, k, v, out, lse, ctx.shapes)
        if q.ndim == 4:  # [tokens, H, D] -> [B, H, T, D]
            return *(x.view(len(q), -1, *x.shape[1:]).transpose(1, 2) for x in grads), None
        return *grads, None


def exact(q: Tensor, k: Tensor, v: Tensor, left: int, right: int, scale: float) -> Tensor:
    """`reference`, a head at a time, and each again in backward: in fp64 one head's scores at 16k tokens are 2 GiB."""
    group = q.shape[1] // k.shape[1]
    heads = ((q[:, i : i + 1], *(x[:, i // group : i // group + 1] for x in (k, v))) for i in range(q.shape[1]))
    return torch.cat([checkpoint(reference, *head, left, right, scale, use_reentrant=False) for head in heads], 1)


def by_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's causal attention, by cuDNN or else by FlashAttention; `reference` lets torch choose."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _case(dtype: torch.dtype, batch: int, heads: int, shared: int, tokens: int, width: int) -> Case:
    """Causal; `shared` heads of k and v."""
    e, pairs = dtype.itemsize, tokens * (tokens + 1) // 2
    rows, rows_k = batch * tokens * heads * width * e, batch * tokens * shared * width * e
    flops = 4 * batch * heads * pairs * width

    def inputs(device: torch.device) -> tuple[Any, ...]:
        made = (torch.randn(batch, tokens, h, width, device=device, dtype=dtype) for h in (heads, shared, shared))
        return tuple(x.transpose(1, 2).detach().requires_grad_() for x in made)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, causal=True)

    def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (exact if q.dtype == torch.float64 else reference)(q, k, v, -1, 0, width**-0.5)

    moved = 2 * rows + 2 * rows_k + 4 * batch * tokens * heads
    return Case(
        f"flash_attention {short(dtype)} {batch}x{heads}/{shared}x{tokens}x{width}", call, oracle, inputs, moved,
        moved_backward=4 * rows + 4 * rows_k + 4 * batch * tokens * heads, flops=flops, flops_backward=flops * 5 // 2,
        peers={"SDPA by cuDNN": by_cudnn},
    )  # fmt: skip


def _packed_case(dtype: torch.dtype, lengths: tuple[int, ...], heads: int, shared: int, width: int, left: int) -> Case:
    """Sequences of these lengths, causal, in a window of `left` tokens before a token's own."""
    tokens, e = sum(lengths), dtype.itemsize
    pairs = sum(n * (n + 1) // 2 - max(n - left - 1, 0) * max(n - left, 0) // 2 for n in lengths)
    flops = 4 * heads * pairs * width

    def inputs(device: torch.device) -> tuple[Any, ...]:
        made = (
            torch.randn(tokens, h, width, device=device, dtype=dtype).requires_grad_() for h in (heads, shared, shared)
        )
        return *made, torch.tensor([0, *lengths]).cumsum(0).int().to(device)

    def call(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        longest = max(lengths)
        return flash_attention_varlen(
            q, k, v, starts, starts, longest_q=longest, longest_k=longest, causal=True, window=(left, 0)
        )

    def oracle(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        return reference_varlen(q, k, v, starts, starts, left, 0, width**-0.5)

    both = tokens * (heads + shared) * width * e
    return Case(
        f"flash_attention_varlen {short(dtype)} {len(lengths)}x{heads}/{shared}x{max(lengths)}x{width}",
        call, oracle, inputs, 2 * both + 4 * tokens * heads, moved_backward=4 * both + 4 * tokens * heads,
        flops=flops, flops_backward=flops * 5 // 2,
    )  # fmt: skip


CASES = (
    _case(torch.bfloat16, 1, 16, 16, 16384, 128),
    _case(torch.bfloat16, 2, 8, 4, 4096, 256),
    _case(torch.float32, 1, 4, 2, 2048, 256),
    _packed_case(torch.bfloat16, (4096, 1000, 17, 3000), 16, 4, 64, 1023),
)
SMALL = (
    _case(torch.float32, 1, 4, 4, 512, 64),
    _packed_case(torch.float32, (300, 17, 195), 4, 2, 64, 127),
)
