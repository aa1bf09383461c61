"""Attention over a pattern beside dense attention and beside torch's FlexAttention with the same mask, taking turns.

Ours reads the pattern's blocks: its bound is density times what dense attention takes. Peers: torch's fused attention
over everything (`F.scaled_dot_product_attention`), which never has the scores in memory; the same written out, as
models have it that are not fused ("eager"); and FlexAttention, compiled by inductor, with a block mask made of the same
layout. Forward and backward; CPU time of one thread (of two, their waiting for each other would count), of which the
least of the turns counts. FlexAttention has no backward on CPUs, and needs a C++ compiler there.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.model.patterns.named import pattern_named
from refimpl.model.sparse import block_sparse_attention
from refimpl.model.tiles import Plan

HEAT = ("tokens", "pattern", "block", "density")
WINDOW = 512  # tokens that a Longformer's token reads around itself (arXiv:2004.05150, section 5)
BIGBIRD = {"num_random_blocks": 3, "num_sliding_window_blocks": 3, "num_global_blocks": 2}  # ITC base, arXiv:2007.14062
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """One contestant in one heat; ms are the least of its turns."""

    tokens: int
    pattern: str
    block: int
    density: float
    contestant: str
    forward_ms: float
    backward_ms: float | None
    forward_of_fused: float  # time / (density x fused dense attention's)
    backward_of_fused: float | None
    forward_of_eager: float  # time / (density x eager dense attention's)
    backward_of_eager: float | None


def measure(
    tokens: Sequence[int],
    patterns: Sequence[str],
    blocks: Sequence[int],
    heads: int,
    width: int,
    turns: int,
    published: bool = False,
) -> Iterator[list[Row]]:
    """A heat for each length, pattern and block; bidirectional, fp32, one sequence. See `options_of`."""
    torch.set_num_threads(1)
    layouts = {
        (length, name, block): pattern_named(name, heads, options_of(name, block, published)).make_layout(length)
        for length in tokens
        for name in patterns
        for block in blocks
    }  # all of them first: what is wrong with the last is said before the first is measured
    for (length, name, block), layout in layouts.items():
        yield heat(length, name, block, layout, width, turns)


def options_of(pattern: str, block: int, published: bool) -> dict[str, Any]:
    """DeepSpeed's defaults; or where a paper says how wide it had a pattern, that."""
    options = {"block": block, "attention": "bidirectional", "seed": 0}
    if published and pattern in ("local", "bslongformer"):
        options["num_sliding_window_blocks"] = -(-WINDOW // block) + 1  # half before, half after, and the token's own
    if published and pattern == "bigbird":
        options |= BIGBIRD
    return options


def heat(length: int, name: str, block: int, layout: Tensor, width: int, turns: int) -> list[Row]:
    """All contestants on the same q, k and v."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(1, len(layout), length, width, device=device, requires_grad=True) for _ in range(3))
    plan = Plan(layout[:1] if all(torch.equal(part, layout[0]) for part in layout) else layout)
    contestants: dict[str, Attention] = {
        "dense, fused": F.scaled_dot_product_attention,
        "dense, eager": eager,
        "ours": lambda q, k, v: block_sparse_attention(q, k, v, plan, block),
    }
    if device == "cuda" or shutil.which("c++") or shutil.which("g++"):
        contestants["FlexAttention"] = flex(layout, block, length, device)
    times: dict[str, list[list[float]]] = {who: [] for who in contestants}
    for _ in range(turns + 1):
        for who, attention in contestants.items():
            times[who].append(timed(attention, q, k, v, backward=who != "FlexAttention" or device == "cuda"))
    least = {who: [min(way) for way in zip(*taken[1:], strict=True)] for who, taken in times.items()}  # one warms up
    bounds = [[plan.density * ms for ms in least[dense]] for dense in ("dense, fused", "dense, eager")]

    def row(who: str, forward: float, backward: float | None = None) -> Row:
        shares = [(forward / f, None if backward is None else backward / b) for f, b in bounds]
        return Row(length, name, block, round(plan.density, 4), who, forward, backward, *shares[0], *shares[1])

    return [row(who, *ms) for who, ms in least.items()]


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[1, H, T, D] -> the same; one head after the other, since the scores of each are T x T in memory."""
    scale = q.shape[3] ** -0.5
    heads = zip(q[0], k[0], v[0], strict=True)
    return torch.stack([torch.softmax(q @ k.T * scale, -1) @ v for q, k, v in heads])[None]


def timed(attention: Attention, q: Tensor, k: Tensor, v: Tensor, backward: bool) -> list[float]:
    """Milliseconds of forward and, if asked, of backward."""
    clock = time.perf_counter if q.is_cuda else time.process_time

    def now() -> float:
        if q.is_cuda:
            torch.cuda.synchronize()
        return clock() * 1e3

    start = now()
    if not backward:
        attention(q.detach(), k.detach(), v.detach())
        return [now() - start]
    out = attention(q, k, v)
    middle = now()
    seed = torch.ones_like(out)
    begun = now()
    torch.autograd.grad(out, (q, k, v), seed)
    return [middle - start, now() - begun]


def flex(layout: Tensor, block: int, length: int, device: str) -> Attention:
    """torch's FlexAttention, compiled, over the same blocks."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    read = layout.bool().to(device)

    def may(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return read[head, query // block, key // block]

    mask = create_block_mask(may, None, len(layout), length, length, device=device, BLOCK_SIZE=max(block, 128))
    compiled: Any = torch.compile(flex_attention)  # as torch 2.11 types it, a tuple may come too
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)
