"""Block-sparse attention in plain torch that reads the blocks of a layout and no others, forward and backward.

A **tile** is what the rows of one head that read the same blocks have in common: m blocks of queries, n blocks of keys.
Tiles of the same m and n are gathered, a few at a time, and multiplied as one batch; the scores of a few tiles are all
that exists of the T x T matrix. Backward gathers and multiplies again in place of keeping probabilities, and adds each
tile's share of dk and dv to its blocks. So for R blocks read of b x b scores, heads of width D:

    FLOPs     forward 4 R b^2 D, backward 10 R b^2 D          memory  CHUNK scores a thread, and the output
    bytes     R / n_rows blocks of k and v copied a row: 2 b D elements a block read, once forward and once backward

which is `density` times what dense attention multiplies. The copies are the price: 1/(2 b) of a byte a FLOP, some
percent at b = 64 and a third of the time at b = 16. Sums are made in fp32 (fp64 for fp64).

A row that reads nothing, or only what masks forbid, gives zeros and gets no gradient. Only tiles on the diagonal are
masked token by token when `causal`; blocks beyond it are not read at all.
Triton's own block-sparse attention, torch-blocksparse, is what DeepSpeed had: deepspeed/ops/sparse_attention/matmul.py
(three products over a list of blocks) and softmax.py. It kept the scores of all blocks; this keeps none.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from refimpl.kernels.block_lists import BlockLists

CHUNK = 2**18  # scores alive at a time and thread: 1 MB in fp32, and backward has two such; about a core's cache
TALL = 256  # tokens of queries in a tile, at most: more of them re-use the gathered keys, and fill the cache


@dataclass(frozen=True)
class Tiles:
    """G tiles of the same size: of each its head in the layout, its rows and its columns."""

    head: Tensor  # [G] of the layout
    rows: Tensor  # [G, m]
    cols: Tensor  # [G, n]


@dataclass(frozen=True)
class Chunk:
    """Some tiles on their way: which blocks of which heads, all by number."""

    q_rows: Tensor  # [g m] blocks of queries, numbered over batch, heads and rows
    k_cols: Tensor  # [g n] blocks of keys, likewise
    places: tuple[Tensor, ...]  # sequence [g], head [g], row [g, m], column [g, n]
    diagonal: tuple[Tensor, ...]  # (tile, i, j) where the i-th row and the j-th column are one block


class Plan:
    """A layout, made ready: which tiles there are. To be made once a layout, kept, and used on any batch.

    layout: [n_q, n_k], [1 or H, n_q, n_k] or [B, H, n_q, n_k] of blocks, true or nonzero where a block is read.
    causal: a token sees none after it. first: the number of the first row's block, where the queries are the last of
    the sequence. ValueError for another shape.
    """

    def __init__(self, layout: Tensor, causal: bool = False, first: int = 0) -> None:
        if layout.dim() not in (2, 3, 4):
            raise ValueError(f"a layout of shape {tuple(layout.shape)}: give [rows, columns], with or without heads")
        read = layout.detach().to("cpu").bool()
        if causal:
            read = read.tril(first)
        self.causal, self.first, self.shape = causal, first, tuple(read.shape[-2:])
        self.by_sequence = read.shape[0] if read.dim() == 4 else None
        read = read.reshape(-1, *self.shape)
        self.heads, self.blocks = len(read), int(read.sum())
        everywhere = read.numel() if not causal else len(read) * int(torch.ones(self.shape).tril(first).sum())
        self.density = self.blocks / max(1, everywhere)
        self.full = self.blocks == everywhere
        self.read = read
        self.lists: dict[torch.device, BlockLists] = {}  # the same for the kernel
        self.chunks: dict[tuple[Any, ...], list[Chunk]] = {}  # of those calls that came

    def for_kernel(self, device: torch.device) -> BlockLists:
        """What the Triton kernel walks along."""
        if device not in self.lists:
            self.lists[device] = BlockLists.of(self.read.to(device), self.causal)
        return self.lists[device]

    def tiles(self, most: int) -> list[Tiles]:
        """All tiles, of `most` rows and less, those of a size together."""
        alike: dict[tuple[int, bytes], list[int]] = defaultdict(list)
        for head, part in enumerate(self.read.numpy()):
            for row, line in enumerate(part):
                alike[head, line.tobytes()].append(row)
        sizes: dict[tuple[int, int], list[tuple[int, list[int], Tensor]]] = defaultdict(list)
        for (head, _), rows in alike.items():
            cols = self.read[head, rows[0]].nonzero().flatten()
            for some in (rows[i : i + most] for i in range(0, len(rows), most)):
                if len(cols):
                    sizes[len(some), len(cols)].append((head, some, cols))
        return [
            Tiles(torch.tensor([t[0] for t in s]), torch.tensor([t[1] for t in s]), torch.stack([t[2] for t in s]))
            for s in sizes.values()
        ]


class Problem:
    """Shapes of one call, and the tiles of its plan for all sequences and heads."""

    def __init__(self, q: Tensor, k: Tensor, plan: Plan, block: int, scale: float, key_bias: Tensor | None) -> None:
        self.batch, self.heads, self.width = q.shape[0], q.shape[1], q.shape[3]
        self.shared = q.shape[1] // max(1, k.shape[1])  # heads of queries to a head of keys
        self.plan, self.block, self.scale = plan, block, scale
        self.device = q.device
        self.sums = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.key_bias = key_bias
        self.held: dict[str, Tensor] = {}

    def chunks(self) -> list[Chunk]:
        """The tiles of all heads, a few at a time; the numbers are kept with the plan."""
        shape = (self.block, self.batch, self.heads, self.shared)
        kept, key = self.plan.chunks, (*shape, self.device, torch.get_num_threads())
        if key not in kept:
            kept[key] = list(self.make_chunks())
        return kept[key]

    def make_chunks(self) -> Iterator[Chunk]:
        (n_rows, n_cols), to = self.plan.shape, self.device
        copies = torch.arange(self.batch * self.heads // self.plan.heads)[:, None] * self.plan.heads
        for tiles in self.plan.tiles(max(1, TALL // self.block)):
            m, n = tiles.rows.shape[1], tiles.cols.shape[1]
            heads = (copies + tiles.head).flatten()  # numbered over the batch
            which = torch.arange(len(tiles.head)).repeat(len(copies))
            step = max(1, CHUNK * torch.get_num_threads() // (m * n * self.block**2))
            for i in range(0, len(heads), step):
                head, some = heads[i : i + step], which[i : i + step]
                rows, cols = tiles.rows[some], tiles.cols[some]
                q_rows = (head[:, None] * n_rows + rows).flatten()
                k_cols = (head[:, None] // self.shared * n_cols + cols).flatten()
                places = (head // self.heads, head % self.heads, rows, cols)
                on: tuple[Tensor, ...] = ()
                if self.plan.causal:
                    on = (rows[:, :, None] + self.plan.first == cols[:, None, :]).nonzero(as_tuple=True)
                here = (tuple(x.to(to) for x in numbers) for numbers in (places, on))
                yield Chunk(q_rows.to(to), k_cols.to(to), *here)

    def scratch(self, name: str, *shape: int) -> Tensor:
        """Memory by name, in the dtype of sums, taken again and again: fresh pages would cost a tenth of the time."""
        size = math.prod(shape)
        if name not in self.held or self.held[name].numel() < size:
            self.held[name] = torch.empty(size, dtype=self.sums, device=self.device)
        return self.held[name][:size].view(shape)

    def gather(self, name: str, x: Tensor, which: Tensor, tiles: int) -> Tensor:
        """Blocks of x [blocks, block D] -> [tiles, their tokens, D], in the dtype of sums."""
        into = self.scratch(name, len(which), x.shape[1])
        if x.dtype == self.sums:
            torch.index_select(x, 0, which, out=into)
        else:
            into.copy_(x.index_select(0, which))
        return into.view(tiles, -1, self.width)

    def blocks_of(self, x: Tensor) -> Tensor:
        """[B, H, T, D] -> [B H n, block D]."""
        return x.reshape(-1, self.block * self.width)

    def probabilities(self, q: Tensor, k: Tensor, chunk: Chunk, biases: Sequence[Tensor]) -> Tensor:
        """q [g, m block, D], k [g, n block, D] -> softmax of the masked scores [g, m block, n block]."""
        scores = self.scratch("scores", len(q), q.shape[1], k.shape[1])
        torch.baddbmm(scores, q, k.transpose(1, 2), beta=0, alpha=self.scale, out=scores)
        _, _, rows, cols = chunk.places
        if self.plan.causal:
            tile, i, j = chunk.diagonal
            by_block = scores.view(len(q), rows.shape[1], self.block, cols.shape[1], self.block)
            future = torch.full((self.block, self.block), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
            by_block[tile, i, :, j] += future
        for bias in biases:
            scores += self.of_bias(bias, chunk).permute(0, 1, 3, 2, 4).reshape(scores.shape)
        if self.key_bias is not None:
            by_key = self.key_bias.view(self.batch, -1, self.block)[chunk.places[0][:, None], cols]
            scores += by_key.view(len(q), 1, -1)
        if self.key_bias is None and not biases:
            return torch.softmax(scores, -1, out=scores)
        nothing = scores.amax(-1, keepdim=True) == -torch.inf
        return torch.softmax(scores, -1, out=scores).masked_fill_(nothing, 0)

    def of_bias(self, bias: Tensor, chunk: Chunk) -> Tensor:
        """The tiles' part of a bias [1 or B, 1 or H, T, T]: [g, m, n, block, block]."""
        return self.by_block(bias)[self.places_in(bias, chunk)].to(self.sums)

    def by_block(self, bias: Tensor) -> Tensor:
        """[1 or B, 1 or H, T_q, T_k] -> a view [.., .., rows, columns, block, block]."""
        batch, heads, t_q, t_k = bias.shape
        return bias.view(batch, heads, t_q // self.block, self.block, t_k // self.block, self.block).transpose(3, 4)

    def places_in(self, bias: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
        """Where the tiles' blocks lie in `by_block(bias)`."""
        sequence, head, rows, cols = chunk.places
        sequence, head = sequence * (bias.shape[0] > 1), head * (bias.shape[1] > 1)
        return sequence[:, None, None], head[:, None, None], rows[:, :, None], cols[:, None, :]


class BlockSparse(torch.autograd.Function):
    """q [B, H, T_q, D], k, v [B, K, T_k, D], biases [1 or B, 1 or H, T_q, T_k] -> attention [B, H, T_q, D]."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, q: Tensor, k: Tensor, v: Tensor, *biases: Tensor) -> Tensor:
        ctx.problem = problem
        ctx.save_for_backward(q, k, v, *biases)
        q_, k_, v_ = (problem.blocks_of(x) for x in (q, k, v))
        out = torch.zeros_like(q_)
        for chunk in problem.chunks():
            rows, cols, tiles = chunk.q_rows, chunk.k_cols, len(chunk.places[0])
            queries, keys = problem.gather("q", q_, rows, tiles), problem.gather("k", k_, cols, tiles)
            values = problem.gather("v", v_, cols, tiles)
            mixed = torch.bmm(problem.probabilities(queries, keys, chunk, biases), values)
            out.index_copy_(0, rows, mixed.to(out.dtype).view(len(rows), -1))
        return out.view(q.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        problem: Problem = ctx.problem
        q, k, v, *biases = ctx.saved_tensors
        q_, k_, v_, g_ = (problem.blocks_of(x) for x in (q, k, v, out_grad))
        dq, dk, dv = (torch.zeros_like(x, dtype=problem.sums) for x in (q_, k_, v_))
        dbias = [
            torch.zeros_like(b) if need else None for b, need in zip(biases, ctx.needs_input_grad[4:], strict=True)
        ]
        for chunk in problem.chunks():
            rows, cols, tiles = chunk.q_rows, chunk.k_cols, len(chunk.places[0])
            queries, grads = problem.gather("q", q_, rows, tiles), problem.gather("g", g_, rows, tiles)
            keys, values = problem.gather("k", k_, cols, tiles), problem.gather("v", v_, cols, tiles)
            p = problem.probabilities(queries, keys, chunk, biases)
            dp = torch.bmm(grads, values.transpose(1, 2), out=problem.scratch("dp", *p.shape))
            share = problem.scratch("share", *keys.shape)  # of dv, then of dk
            dv.index_add_(0, cols, torch.bmm(p.transpose(1, 2), grads, out=share).view(len(cols), -1))
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype, grad_input=dp)  # p (dp - sum(p dp))
            dq.index_copy_(0, rows, torch.bmm(ds, keys).view(len(rows), -1))
            dk.index_add_(0, cols, torch.bmm(ds.transpose(1, 2), queries, out=share).view(len(cols), -1))
            by_block = ds.view(len(ds), -1, problem.block, ds.shape[2] // problem.block, problem.block).transpose(2, 3)
            for bias, grad in zip(biases, dbias, strict=True):
                if grad is not None:
                    where = problem.places_in(bias, chunk)
                    problem.by_block(grad).index_put_(where, by_block.to(grad.dtype), accumulate=True)
        dq.mul_(problem.scale)
        dk.mul_(problem.scale)
        return None, dq.to(q.dtype).view(q.shape), dk.to(k.dtype).view(k.shape), dv.to(v.dtype).view(v.shape), *dbias
