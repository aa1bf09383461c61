"""Block-sparse attention in plain torch that reads the blocks of a layout and no others, forward and backward.

The tiles of `tiles.py` are gathered, a few at a time, and multiplied as one batch; the scores of a few tiles are all
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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from refimpl.model.tiles import Blocks, Chunk, Plan


class Problem:
    """Shapes of one call, and the tiles of its plan for all sequences and heads."""

    def __init__(self, q: Tensor, k: Tensor, plan: Plan, block: int, scale: float, key_bias: Tensor | None) -> None:
        self.batch, self.heads, self.width = q.shape[0], q.shape[1], q.shape[3]
        self.plan, self.block, self.scale, self.device = plan, block, scale, q.device
        shared = q.shape[1] // max(1, k.shape[1])
        self.chunks = plan.chunks(block, self.batch, self.heads, shared, q.device)
        self.sums = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.key_bias = key_bias
        self.held: dict[str, Tensor] = {}
        self.views: dict[tuple[str, tuple[int, ...]], Tensor] = {}  # of what is held

    def scratch(self, name: str, *shape: int) -> Tensor:
        """Memory by name, in the dtype of sums, taken again and again: fresh pages would cost a tenth of the time."""
        if (name, shape) not in self.views:
            size = math.prod(shape)
            if name not in self.held or self.held[name].numel() < size:
                self.held[name] = torch.empty(size, dtype=self.sums, device=self.device)
                self.views = {key: view for key, view in self.views.items() if key[0] != name}
            self.views[name, shape] = self.held[name][:size].view(shape)
        return self.views[name, shape]

    def where(self, x: Tensor, blocks: Blocks) -> Tensor | None:
        """Blocks of x [blocks, block D] where they lie, [tiles, tokens, D]; None unless evenly, in sums' dtype."""
        if blocks.even is None or x.dtype != self.sums:
            return None
        (first, step), size = blocks.even, self.block * self.width
        shape = (blocks.tiles, blocks.each * self.block, self.width)
        return x.as_strided(shape, (step * size, self.width, 1), x.storage_offset() + first * size)

    def gather(self, name: str, x: Tensor, blocks: Blocks) -> Tensor:
        """Blocks of x [blocks, block D] -> [tiles, tokens, D] in the dtype of sums: where they lie, or copied."""
        if (there := self.where(x, blocks)) is not None:
            return there
        into = self.scratch(name, blocks.tiles * blocks.each, x.shape[1])
        if x.dtype == self.sums:
            torch.index_select(x, 0, blocks.numbers, out=into)
        else:
            into.copy_(x.index_select(0, blocks.numbers))
        return into.view(blocks.tiles, -1, self.width)

    def put(self, x: Tensor, blocks: Blocks, a: Tensor, b: Tensor, scale: float) -> None:
        """scale a b [tiles, tokens, D] becomes these blocks of x."""
        there = self.where(x, blocks)
        into = self.scratch("put", *a.shape[:2], b.shape[2]) if there is None else there
        times(a, b, into, scale)
        if there is None:
            x.index_copy_(0, blocks.numbers, into.view(-1, x.shape[1]).to(x.dtype))

    def fresh(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for a result of every row; of zeros, if some read nothing."""
        return (torch.empty_like if self.plan.covered else torch.zeros_like)(like, dtype=dtype)

    def blocks_of(self, x: Tensor) -> Tensor:
        """[B, H, T, D] -> [B H n, block D]."""
        return x.reshape(-1, self.block * self.width).contiguous()

    def probabilities(self, q: Tensor, k: Tensor, chunk: Chunk, biases: Sequence[Tensor]) -> Tensor:
        """q [g, m block, D], k [g, n block, D] -> softmax of the masked scores [g, m block, n block]."""
        scores = times(q, k.transpose(1, 2), self.scratch("scores", len(q), q.shape[1], k.shape[1]), self.scale)
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


def times(a: Tensor, b: Tensor, into: Tensor, scale: float = 1) -> Tensor:
    """scale a b, in `into`."""
    return torch.baddbmm(into, a, b, beta=0, alpha=scale, out=into)


class BlockSparse(torch.autograd.Function):
    """q [B, H, T_q, D], k, v [B, K, T_k, D], biases [1 or B, 1 or H, T_q, T_k] -> attention [B, H, T_q, D]."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, q: Tensor, k: Tensor, v: Tensor, *biases: Tensor) -> Tensor:
        ctx.problem = problem
        ctx.save_for_backward(q, k, v, *biases)
        q_, k_, v_ = (problem.blocks_of(x) for x in (q, k, v))
        out = problem.fresh(q_, q_.dtype)
        for chunk in problem.chunks:
            queries, keys = problem.gather("q", q_, chunk.q_rows), problem.gather("k", k_, chunk.k_cols)
            p = problem.probabilities(queries, keys, chunk, biases)
            values = problem.gather("k", v_, chunk.k_cols)  # where the keys were: less cache
            problem.put(out, chunk.q_rows, p, values, 1)
        return out.view(q.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        problem: Problem = ctx.problem
        q, k, v, *biases = ctx.saved_tensors
        q_, k_, v_, g_ = (problem.blocks_of(x) for x in (q, k, v, out_grad))
        dq, dk, dv = problem.fresh(q_, problem.sums), *(torch.zeros_like(x, dtype=problem.sums) for x in (k_, v_))
        dbias = [
            torch.zeros_like(b) if need else None for b, need in zip(biases, ctx.needs_input_grad[4:], strict=True)
        ]
        for chunk in problem.chunks:
            rows, cols = chunk.q_rows, chunk.k_cols
            queries, grads = problem.gather("q", q_, rows), problem.gather("g", g_, rows)
            keys, values = problem.gather("k", k_, cols), problem.gather("v", v_, cols)
            p = problem.probabilities(queries, keys, chunk, biases)
            dp = times(grads, values.transpose(1, 2), problem.scratch("dp", *p.shape))
            share = problem.scratch("v", *keys.shape)  # of dv, then of dk, where the values were
            dv.index_add_(0, cols.numbers, times(p.transpose(1, 2), grads, share).view(-1, dv.shape[1]))
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype, grad_input=dp)  # p (dp - sum(p dp))
            problem.put(dq, rows, ds, keys, problem.scale)
            times(ds.transpose(1, 2), queries, share, problem.scale)
            dk.index_add_(0, cols.numbers, share.view(-1, dk.shape[1]))
            by_block = ds.view(len(ds), -1, problem.block, ds.shape[2] // problem.block, problem.block).transpose(2, 3)
            for bias, grad in zip(biases, dbias, strict=True):
                if grad is not None:
                    where = problem.places_in(bias, chunk)
                    problem.by_block(grad).index_put_(where, by_block.to(grad.dtype), accumulate=True)
        return None, dq.to(q.dtype).view(q.shape), dk.to(k.dtype).view(k.shape), dv.to(v.dtype).view(v.shape), *dbias
