"""Right answers that are written otherwise than the solution pass."""

from pathlib import Path

import pytest
from answers import grader
from worlds import TRITON

from refimpl.grading.chapters import find_chapter
from refimpl.grading.live import exercises_of

ANSWERS = {
    ("03", "sum_in_fp32"): '''"""In fp64: exact wherever fp32 is in row order."""


def sum_in_fp32(rows):
    return sum(row.double() for row in rows).to(rows.dtype)
''',
    (
        "13",
        "ring_attention",
    ): '''"""The next keys travel while this rank computes with those at hand: both ways of a hop under way."""

import math

import torch


def ring_attention(group, q, k, v, positions):
    out, total = torch.zeros(q.shape, dtype=torch.float32), torch.full(q.shape[:-1], -math.inf)
    here, mine = torch.stack([k, v]), positions[group.rank][:, None]
    for hop in range(group.size):
        works = []
        if hop < group.size - 1:
            coming = torch.empty_like(here)
            works.append(group.send(here, (group.rank + 1) % group.size, async_op=True))
            works.append(group.recv(coming, (group.rank - 1) % group.size, async_op=True))
        theirs = positions[(group.rank - hop) % group.size]
        seen = (theirs >= 0) & (theirs <= mine)
        scores = q.float() @ here[0].float().mT * q.shape[-1] ** -0.5
        lse = scores.masked_fill_(~seen, -math.inf).logsumexp(-1)
        part = (scores - lse.unsqueeze(-1)).exp().masked_fill(~seen, 0) @ here[1].float()
        both = torch.logaddexp(total, lse)
        for_old, for_new = ((x - both).exp().masked_fill(x.isneginf(), 0).unsqueeze(-1) for x in (total, lse))
        out, total = out * for_old + part * for_new, both
        for work in works:
            work.wait()
        if works:
            here = coming
    return out.to(q.dtype)
''',
    ("13", "coordinates"): '''"""From the last axis on: an equal dict, whose keys come in another order."""


def coordinates(axes, rank):
    place = {}
    for name in reversed(list(axes)):
        rank, place[name] = divmod(rank, axes[name])
    return place
''',
    ("08", "DelayedUpdate"): '''"""The thread sets the masters' gradients, from copies that are a closure's."""

from concurrent.futures import ThreadPoolExecutor

import torch


class DelayedUpdate:
    def __init__(self, params, optimizer):
        self.params = list(params)
        self.masters = [p.detach().clone().requires_grad_() for p in self.params]
        self.optimizer = optimizer(self.masters)
        self.thread, self.under_way = ThreadPoolExecutor(1), None

    def step(self):
        self.finish()
        copies = [p.grad if p.grad is None else p.grad.clone() for p in self.params]

        def work():
            for master, gradient in zip(self.masters, copies, strict=True):
                master.grad = gradient
            self.optimizer.step()
            for master in self.masters:
                master.grad = None

        self.under_way = self.thread.submit(work)

    def finish(self):
        ended, self.under_way = self.under_way, None
        if ended is not None:
            ended.result()
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.masters)
''',
    (
        "14",
        "flash_kernel",
    ): '''"""The loop goes over all keys, and an `if` on single numbers leaves out the blocks behind the diagonal."""

import triton
import triton.language as tl


@triton.jit
def flash_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, T, group, scale, q_head, q_token, kv_head, kv_token,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0) * BM, tl.program_id(1)
    query, feature = first + tl.arange(0, BM), tl.arange(0, D)[None, :]
    inside = query[:, None] < T
    q = tl.load(q_ptr + head * q_head + query[:, None] * q_token + feature, mask=inside, other=0.0)
    kv = head // group * kv_head + feature
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    result = tl.zeros((BM, D), tl.float32)
    for start in range(0, T, BN):
        if start < first + BM and start < T:
            key = start + tl.arange(0, BN)
            at = kv + key[:, None] * kv_token
            k = tl.load(k_ptr + at, mask=key[:, None] < T, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BM, BN]
            scores = tl.where(query[:, None] >= key[None, :], scores, -float("inf"))
            new = tl.maximum(top, tl.max(scores, axis=1))
            weights = tl.exp(scores - new[:, None])
            shrink = tl.exp(top - new)
            total = total * shrink + tl.sum(weights, axis=1)
            v = tl.load(v_ptr + at, mask=key[:, None] < T, other=0.0)
            result = tl.dot(weights.to(v.dtype), v, result * shrink[:, None], input_precision="ieee")
            top = new
    out = (head * T + query[:, None]) * D + feature
    tl.store(out_ptr + out, result / total[:, None], mask=inside)
    tl.store(lse_ptr + head * T + query, top + tl.log(total), mask=query < T)
''',
    ("14", "dropout_kernel"): '''"""What is dropped is not loaded."""

import triton
import triton.language as tl


@triton.jit
def dropout_kernel(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, i) >= p
    x = tl.load(x_ptr + i, (i < n) & keep, 0.0).to(tl.float32)
    tl.store(out_ptr + i, x * (1.0 / (1.0 - p)), i < n)
''',
    ("10", "bus_bandwidth"): '''"""The two numbers as a list."""


def bus_bandwidth(op, nbytes, ranks, seconds):
    share = (ranks - 1) / ranks
    factors = {"all_reduce": 2 * share, "broadcast": 1, "send": 1}
    factors |= dict.fromkeys(["reduce_scatter", "all_gather", "all_to_all"], share)
    if op not in factors:
        raise ValueError(op)
    rate = nbytes / seconds * (ranks if op == "all_gather" else 1)
    return [rate, rate * factors[op]]
''',
    ("15", "positions"): '''"""Padding has a column of its own, for one_hot takes no -1."""

import torch.nn.functional as F


def positions(experts, number, capacity):
    flat = experts.T.flatten()
    before = (F.one_hot(flat + 1, number + 1).cumsum(0) - 1).gather(1, flat[:, None] + 1)[:, 0]
    return before.masked_fill((before >= capacity) | (flat < 0), -1).view(experts.T.shape).T
''',
    ("16", "block_lists"): '''"""torch's sparse rows are such lists."""


def block_lists(layout):
    rows = layout.flatten(0, 1).float().to_sparse_csr()
    return rows.crow_indices(), rows.col_indices()
''',
    ("16", "sparse_backward"): '''"""Block by block, and the row sums by an einsum, which counts as a product."""

import torch


def sparse_backward(q, k, v, out, lse, out_grad, layout, causal):
    n = len(layout)
    b, scale = len(q) // n, q.shape[1] ** -0.5
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    delta = torch.einsum("td,td->t", out_grad, out)
    for r, c in layout.nonzero().tolist():
        if causal and c > r:
            continue
        R, C = slice(r * b, r * b + b), slice(c * b, c * b + b)
        p = torch.exp(q[R] @ k[C].T * scale - lse[R, None])
        p = p.tril() if causal and c == r else p
        dv[C] += p.T @ out_grad[R]
        ds = p * (out_grad[R] @ v[C].T - delta[R, None]) * scale
        dq[R] += ds @ k[C]
        dk[C] += ds.T @ q[R]
    return dq, dk, dv
''',
}


@pytest.mark.parametrize(
    ("chapter", "task"), [pytest.param(*key, marks=[TRITON] * (key[0] == "14")) for key in ANSWERS]
)
def test_it_passes(tmp_path: Path, chapter: str, task: str) -> None:
    file = tmp_path / "exercise.py"
    file.write_text(ANSWERS[chapter, task])
    (exercise,) = (exercise for exercise in exercises_of(find_chapter(chapter)) if exercise.task == task)
    verdict = grader().grade(exercise, file)
    assert verdict.outcome == "pass", verdict.text
