"""Grades chapter 16's attention: masked dense attention's numbers, and the blocks of the layout alone."""

import math

import torch
from torch import Tensor

from refimpl.grading.compare import equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup
from refimpl.grading.work import Work, poisoned
from refimpl.model.native_sparse import coarse, selected
from refimpl.model.patterns import parts

BOUND = {"rtol": 1e-4, "atol": 2e-5}
ADVICE = "take only the blocks that a row reads, a row of blocks at a time"


def problem(n: int, block: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v [T, D] and a layout with a row that reads nothing and a column that nobody reads."""
    torch.manual_seed(seed)
    q, k, v = (2 * torch.randn(n * block, width) for _ in range(3))
    layout = parts.window(n, 3) | (torch.rand(n, n) < 0.2)
    if n > 1:
        layout[n // 2] = False
        layout[:, 1] = False
    return q, k, v, layout


def mask_of(layout: Tensor, block: int, causal: bool) -> Tensor:
    mask = layout.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return mask.tril() if causal else mask


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """In float64: (out, lse)."""
    q, k, v = q.double(), k.double(), v.double()
    scores = (q @ k.T * (1 / math.sqrt(q.shape[1]) if scale is None else scale)).masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse.masked_fill(lse == -torch.inf, 0)[:, None]).exp() @ v, lse


CASES = [(12, 8, 4, False), (12, 8, 4, True), (9, 16, 3, True), (1, 4, 2, True), (20, 4, 6, False)]


@on_ranks(1)
def test_sparse_forward(answer: Answer, group: WatchedGroup) -> None:
    for (n, block, width, causal), size in [*((each, 1) for each in CASES), ((9, 4, 3, True), 50)]:
        case(f"{n} blocks of {block} tokens, width {width}, causal = {causal}{', scores of hundreds' * (size > 1)}")
        q, k, v, layout = problem(n, block, width, n)
        q = -size * k if size > 1 else q  # then the first token, which sees itself alone, scores far below 0
        mask = mask_of(layout, block, causal)
        right, lse = dense(q, k, v, mask)
        read = layout.tril() if causal else layout
        with untouched(q=q, k=k, v=v, layout=layout), Work() as work:
            found = answer.sparse_forward(q, k, v, layout, causal)
        require(isinstance(found, tuple) and len(found) == 2, "return (out, lse)")
        out, sums = found
        require(isinstance(out, Tensor) and out.shape == q.shape, "out must be [T, D]")
        nothing = mask.sum(1) == 0
        require(
            not bool(out[nothing].isnan().any()),
            "a row of tokens that sees nothing is NaN: softmax of nothing. It must be zeros, with an lse of -inf",
        )
        lost = isinstance(sums, Tensor) and sums.shape == lse.shape and bool((sums.isinf() & ~nothing).any())
        why = "exp of a large score overflows, subtract the largest" if size > 1 else "is a token hidden from itself?"
        require(not lost, f"lse is infinite where tokens are seen: {why}")
        later = dense(q, k, v, mask_of(layout, block, False))[0].float()
        shares = dense(q, k, torch.eye(len(q)), mask_of(read, block, False))[0]  # of all tokens in the blocks
        known = {
            "hidden tokens have a share in the softmax: mask the scores before it, not the shares after it": (
                shares.masked_fill(~mask, 0) @ v.double()
            ).float(),
            "tokens of the diagonal block see tokens after them: mask it by token": dense(
                q, k, v, mask_of(layout.tril(), block, False)
            )[0].float(),
            "causal = True is ignored": later,
            "scores are not divided by sqrt(D)": dense(q, k, v, mask, 1.0)[0].float(),
            "scores are divided by the root of the block's tokens, not of the width": dense(q, k, v, mask, block**-0.5)[
                0
            ].float(),
            "scores are divided by D, not by its root": dense(q, k, v, mask, 1 / width)[0].float(),
        }
        equal(out, right.float(), "out", known=known, **BOUND)
        scores = (q.double() @ k.double().T / width**0.5).masked_fill(~mask, -torch.inf)
        largest = scores.amax(1)
        others = {
            "it has another base: natural logarithms are asked": (lse / math.log(2)).float(),
            "it is -inf where a row sees nothing: nothing was added up": lse.float().masked_fill(nothing, 0),
            "this is the largest score: the sum is missing": largest.float(),
            "the largest score was subtracted, and is missing": (lse - largest)
            .float()
            .masked_fill(nothing, -torch.inf),
        }
        equal(sums, lse.float(), "lse", known=others, **BOUND)
        for col in range(n):
            absent = torch.arange(n) == col
            mixed = answer.sparse_forward(q, poisoned(k, block, absent), poisoned(v, block, absent), layout, causal)[0]
            touched = mixed.view(n, -1).isnan().any(1)
            for row in (touched & ~read[:, col]).nonzero().flatten().tolist():
                reason = "in the future" if layout[row, col] else "not in the layout"
                require(False, f"row {row} reads block {col} of keys or values, which is {reason}: {ADVICE}")
        work.judge(4 * int(read.sum()) * block**2 * width, 4 * max(block, width) * n * block * 2, ADVICE)


@on_ranks(1)
def test_sparse_backward(answer: Answer, group: WatchedGroup) -> None:
    for (n, block, width, causal), size in [*((each, 1) for each in CASES), ((9, 4, 3, True), 50)]:
        case(f"{n} blocks of {block} tokens, width {width}, causal = {causal}{', scores of hundreds' * (size > 1)}")
        q, k, v, layout = problem(n, block, width, n + 1)
        q = -size * k if size > 1 else q  # exp of a score or an lse is 0 or infinite, exp of score - lse is not
        mask = mask_of(layout, block, causal)
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        out, lse = dense(*leaves, mask)
        g = torch.randn(n * block, width)
        right = [x.float() for x in torch.autograd.grad(out, leaves, g.double())]
        out, lse = out.detach().float(), lse.detach().float()
        read = layout.tril() if causal else layout
        with untouched(q=q, k=k, v=v, out=out, lse=lse, out_grad=g, layout=layout), Work() as work:
            found = answer.sparse_backward(q, k, v, out, lse, g, layout, causal)
        require(isinstance(found, tuple) and len(found) == 3, "return (dq, dk, dv)")
        p = torch.where(mask, (q @ k.T / width**0.5 - lse[:, None]).exp(), 0)
        ds = p * (g @ v.T) / width**0.5
        ahead = torch.where(mask_of(layout.tril(), block, False), (q @ k.T / width**0.5 - lse[:, None]).exp(), 0)
        whole = p * (g @ v.T - (g * out).sum(1, True)) / width**0.5
        knowns = [
            {
                "the row sums sum(out_grad * out) are not subtracted": ds @ k,
                "the last block that a row reads overwrites the others: add them": last_row(whole.T, k, read.T, block),
                "d is the sum of p * dp over a row, which is that of out_grad * out: dp alone was added up": p
                * (g @ v.T - torch.where(mask, g @ v.T, 0).sum(1, True))
                / width**0.5
                @ k,
                "d is the sum of out_grad * out over a row, not its mean": p
                * (g @ v.T - (g * out).mean(1, True))
                / width**0.5
                @ k,
                "it lacks 1 / sqrt(D)": right[0] * width**0.5,
                "1 / sqrt(D) is in it twice": right[0] / width**0.5,
                "tokens of the diagonal block see tokens after them: mask them here as in forward": (
                    ahead * (g @ v.T - (g * out).sum(1, True)) / width**0.5 @ k
                ),
            },
            {
                "the row sums sum(out_grad * out) are not subtracted": ds.T @ q,
                "it lacks 1 / sqrt(D)": right[1] * width**0.5,
                "1 / sqrt(D) is in it twice": right[1] / width**0.5,
                "the last row that reads a block overwrites the others: add them": last_row(whole, q, read, block),
            },
            {"the last row that reads a block overwrites the others: add them": last_row(p, g, read, block)},
        ]
        lost = "{} has NaN: rows that see nothing have lse -inf; leave them out"
        if size > 1:
            lost = "{} is not finite: exp of a large score overflows: p = exp(scores - lse), masked before exp"
        for name, x, expected, known in zip(("dq", "dk", "dv"), found, right, knowns, strict=True):
            require(isinstance(x, Tensor) and bool(x.isfinite().all()), lost.format(name))
            equal(x, expected, name, known=known, rtol=1e-3, atol=1e-4)
        nobody = ~read.any(0)
        k_, v_ = poisoned(k, block, nobody), poisoned(v, block, nobody)
        again = answer.sparse_backward(q, k_, v_, out, lse, g, layout, causal)
        require(not any(bool(x.isnan().any()) for x in again), f"a block that no row reads is read: {ADVICE}")
        row_sums = 2 * n * block * width  # an einsum makes them, too
        product = 2 * int(read.sum()) * block**2 * width
        again = work.flops - 6 * product in (0, row_sums)
        require(not again, "six products a block, where five are enough: `out` is given, and need not be made again")
        work.judge(5 * product + row_sums, 4 * max(block, width) * n * block * 2, ADVICE)


def last_row(weights: Tensor, x: Tensor, read: Tensor, block: int) -> Tensor:
    """weights^T x, of which each block of keys has the part of the last row that reads it."""
    out = torch.zeros_like(x)
    for row, col in read.nonzero().tolist():
        here, there = slice(row * block, row * block + block), slice(col * block, col * block + block)
        out[there] = weights[here, there].T @ x[here]
    return out


@on_ranks(1)
def test_select_blocks(answer: Answer, group: WatchedGroup) -> None:
    for n, block, width, count in ((10, 8, 4, 2), (7, 4, 3, 1), (6, 16, 8, 9), (1, 4, 2, 1), (16, 8, 4, 0)):
        case(f"{n} blocks of {block} tokens, width {width}, count = {count}")
        torch.manual_seed(n)
        q, k = 2 * torch.randn(n * block, width), 2 * torch.randn(n * block, width)
        right = selected(coarse(q[None, None], k[None, None], block), block, count)[0, 0]
        with untouched(q=q, k=k), Work() as work:
            found = answer.select_blocks(q, k, block, count)
        if isinstance(found, Tensor) and found.shape == (n, n):
            require(not bool(found.bool().triu(1).any()), "a row reads a block that comes after it")
            require(bool(found.bool().diagonal().all()), "every row reads its own block, besides the `count` before it")
        equal(found, right, "the layout", known=other_choices(q, k, block, count))
        advice = "score the means of blocks, not the keys"
        work.judge(2 * n * block * n * width, 4 * n * block * max(n, width), advice)


def other_choices(q: Tensor, k: Tensor, block: int, count: int) -> dict[str, Tensor]:
    """The layouts of well-known mistakes."""
    n, width = len(q) // block, q.shape[1]
    scores = q @ k.view(n, block, width).mean(1).T / width**0.5
    before = torch.ones(n, n, dtype=torch.bool).tril(-1)

    def shares(scores: Tensor, seen: Tensor) -> Tensor:
        """[n, block, n]: each token's probabilities of the blocks that its row sees."""
        p = scores.masked_fill(~seen.repeat_interleave(block, 0), -torch.inf).softmax(1).nan_to_num(0.0)
        return p.view(n, block, n)

    def chosen(wish: Tensor, most: int = count, of: Tensor = before) -> Tensor:
        best = wish.masked_fill(~of, -torch.inf).topk(min(most, n), 1).indices
        return torch.zeros_like(before).scatter(1, best, True) & of | torch.eye(n, dtype=torch.bool)

    wish = shares(scores, before).sum(1)
    votes = torch.nn.functional.one_hot(shares(scores, before).argmax(2), n).float()
    return {
        "wishes are sums of probabilities over a row's tokens, not the scores of their mean": chosen(
            scores.view(n, block, n).sum(1)
        ),
        "a softmax over all blocks: a token attends to those alone that ended before it": chosen(
            shares(scores, torch.ones_like(before)).sum(1)
        ),
        "a token's own block has a share in its softmax: only blocks that ended before it have": chosen(
            shares(scores, before | torch.eye(n, dtype=torch.bool)).sum(1)
        ),
        "a row wishes by the sum over its tokens, not by the one that wishes most": chosen(
            shares(scores, before).amax(1)
        ),
        "a row wishes by the sum over its tokens, not by its last one": chosen(shares(scores, before)[:, -1]),
        "a token has no single vote: its probabilities are added up": chosen(votes.sum(1)),
        "scores are not divided by sqrt(D)": chosen(shares(scores * width**0.5, before).sum(1)),
        "a block is represented by its mean, not by its sum": chosen(shares(scores * block, before).sum(1)),
        "the block just before a row is left out: it has ended, so it can be chosen": chosen(wish, of=before.tril(-2)),
        "the row's own block is one of the `count`: it comes besides them": chosen(wish, max(0, count - 1)),
        "a row reads more than `count` blocks before its own": chosen(wish, count + 1),
    }
