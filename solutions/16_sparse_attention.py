"""Chapter 16, sparse attention: blocks of queries that read some blocks of keys, and no others.

A layout says which: a bool tensor [n, n], True where the block of queries of that row reads the
block of keys of that column. With T tokens in blocks of b, n = T / b. Rows and columns count
from 0.

What a grader looks at besides the result: absent blocks of k and v hold NaN, so whoever reads
them shows it; products (matmul, bmm, einsum, @) are counted; and so is the largest tensor that
is made.
"""

import random

import torch
from torch import Tensor


def fixed_layout(n: int, local: int, causal: bool) -> Tensor:
    """Sparse Transformers' fixed pattern: bool [n, n].

    The sequence is cut in stretches of `local` blocks, the last one perhaps shorter. A row
    reads its own stretch, and of every stretch the last block: its representative. causal: a
    row reads nothing that comes after it.

    fixed_layout(4, 2, True) is
        #...
        ##..
        .##.
        .###
    """
    block = torch.arange(n)
    layout = block[:, None] // local == block // local
    last = torch.arange(n) % local == local - 1
    last[-1:] = True  # of a stretch that is cut short
    layout = layout | last
    return layout.tril() if causal else layout


def bigbird_layout(n: int, width: int, first: int, each: int, rng: random.Random) -> Tensor:
    """BigBird's pattern, of an encoder: bool [n, n], the union of

    - a window: `width` (odd) blocks around one's own, as far as there are so many;
    - global blocks: the first `first` are read by every row, and read everything;
    - random blocks: for each row, from the first to the last, rng.sample(range(n), each).
    """
    block = torch.arange(n)
    layout = (block[:, None] - block).abs() <= width // 2
    layout[:first] = True
    layout[:, :first] = True
    for row in range(n):
        layout[row, rng.sample(range(n), each)] = True
    return layout


def layers_to_see(layout: Tensor) -> Tensor:
    """How many layers it takes until a block has heard of another: int64 [n, n]; -1 where it
    never does.

    In one layer row r takes from the blocks that it reads. In the next it takes what those have
    taken, and so on. A block knows itself after 0 layers. With a window of 3 blocks, [0, 2] is
    2. The layout is the same in all layers.
    """
    n = len(layout)
    layers = torch.full((n, n), -1)
    seen, count = torch.eye(n, dtype=torch.bool, device=layout.device), 0
    while bool((seen & (layers < 0)).any()):
        layers[seen & (layers < 0)] = count
        seen = (layout.float() @ seen.float() > 0) | seen
        count += 1
    return layers


def block_lists(layout: Tensor) -> tuple[Tensor, Tensor]:
    """A layout [heads, n, n] as a kernel walks it: (starts int64 [heads n + 1], blocks int64
    [present]).

    The rows of all heads, one after the other. Row r of head h reads blocks[starts[h n + r] :
    starts[h n + r + 1]], in ascending order; a row may read nothing. starts ends with the
    number of blocks present, which can be above 2^24: count in whole numbers. No loop over
    rows: a layout has many thousands of them.
    """
    counts = layout.sum(-1).flatten()
    starts = torch.zeros(counts.numel() + 1, dtype=torch.int64)
    starts[1:] = counts.cumsum(0)
    return starts, layout.nonzero()[:, -1]


def sparse_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(D)) v over the blocks of `layout` [n, n]: (out [T, D], lse [T]),
    fp32.

    q, k, v [T, D] fp32, one head. lse is the log of the sum of a row's exponentials. causal:
    token i sees no token after i; blocks that are in the layout but wholly in the future are
    then not read either. A row of tokens that sees nothing gives zeros, and lse -inf. Cost:
    4 b^2 D FLOPs a block that is read, and no tensor larger than a row of blocks, b x T.
    """
    (length, width), n = q.shape, len(layout)
    b = length // n
    out, lse = torch.zeros_like(q), torch.full((length,), -torch.inf, dtype=q.dtype)
    for row, cols in rows_of(layout, causal):
        here = slice(row * b, row * b + b)
        there = tokens_of(cols, b)
        scores = q[here] @ k[there].T / width**0.5  # [b, cols b]
        if causal:
            scores = scores.masked_fill(there > torch.arange(length)[here, None], -torch.inf)
        lse[here] = scores.logsumexp(-1)
        out[here] = (scores - lse[here, None]).exp() @ v[there]
    return out, lse


def sparse_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    out_grad: Tensor,
    layout: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of sparse_forward's q, k, v, each [T, D], from what it returned and the
    gradient of `out`.

    With p = exp(scores - lse), s = scores and the row sums d = sum(out_grad * out): dv = p^T
    out_grad, dp = out_grad v^T, ds = p (dp - d), dq = ds k / sqrt(D), dk = ds^T q / sqrt(D).
    Cost: 10 b^2 D FLOPs a block that is read (scores are made again), and no tensor larger than
    b x T. A block of keys is read by many rows: its gradient is the sum over them.
    """
    (length, width), n = q.shape, len(layout)
    b = length // n
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    d = (out_grad * out).sum(-1, keepdim=True)
    for row, cols in rows_of(layout, causal):
        here = slice(row * b, row * b + b)
        there = tokens_of(cols, b)
        p = (q[here] @ k[there].T / width**0.5 - lse[here, None]).exp()
        if causal:
            p = p.masked_fill(there > torch.arange(length)[here, None], 0)
        dv[there] += p.T @ out_grad[here]
        ds = p * (out_grad[here] @ v[there].T - d[here]) / width**0.5
        dq[here] = ds @ k[there]
        dk[there] += ds.T @ q[here]
    return dq, dk, dv


def rows_of(layout: Tensor, causal: bool) -> list[tuple[int, Tensor]]:  # given
    """(row, its columns in ascending order) of every row that reads something; causal: none
    after the row itself.
    """
    read = layout.tril() if causal else layout
    return [
        (row, cols) for row, line in enumerate(read) if len(cols := line.nonzero().flatten())
    ]


def tokens_of(blocks: Tensor, b: int) -> Tensor:  # given
    """The numbers of the tokens in these blocks: int64 [blocks b]."""
    return (blocks[:, None] * b + torch.arange(b)).flatten()


def select_blocks(q: Tensor, k: Tensor, block: int, count: int) -> Tensor:
    """A choice in the manner of native sparse attention: which blocks each block of queries
    reads (in the paper each query chooses for itself, with its group of heads): bool [n, n];
    causal.

    q, k [T, D], one head. A block of keys is represented by its mean. Each token attends to the
    means of the blocks that ended before it: softmax(q mean^T / sqrt(D)); a token that has none
    gives nothing. A row wishes for a block by the sum of these probabilities over its own
    tokens. It reads the `count` blocks before it that it wishes for most (all, if there are
    fewer), and its own. Cost: 2 T n D FLOPs, no tensor larger than T x n and T x D.
    """
    (length, width), n = q.shape, len(q) // block
    means = k.view(n, block, width).mean(1)
    before = torch.arange(n) < torch.arange(length)[:, None] // block  # [T, n]
    scores = (q @ means.T / width**0.5).masked_fill(~before, -torch.inf)
    wish = scores.softmax(-1).nan_to_num(0).view(n, block, n).sum(1)  # [n, n]
    past = torch.ones(n, n, dtype=torch.bool).tril(-1)
    best = wish.masked_fill(~past, -1).topk(min(count, n), -1).indices
    return torch.zeros(n, n, dtype=torch.bool).scatter(1, best, True) & past | torch.eye(
        n, dtype=torch.bool
    )


HINTS = {
    "fixed_layout": [
        "Two blocks share a stretch if block // local is the same. Which blocks are representatives does not depend on "
        "the row.",
        "The last block of a stretch has block % local == local - 1; one that is cut short has its own: n - 1.",
    ],
    "bigbird_layout": [
        "Three unions. Comparing torch.arange(n)[:, None] with torch.arange(n) gives the window without a loop.",
        "Global means both ways: layout[:first] = True and layout[:, :first] = True. Draw row after row.",
    ],
    "layers_to_see": [
        "What a block has heard of after L + 1 layers: of all that the blocks it reads had heard of after L.",
        "seen @ means 'or over and': layout.float() @ seen.float() > 0. Stop when nothing new is seen; write the layer "
        "number where something is seen for the first time.",
    ],
    "block_lists": [
        "The number of True in each row gives starts, by cumsum. Where nonzero finds them, in order, gives blocks.",
        "starts[1:] = layout.sum(-1).flatten().cumsum(0), and layout.nonzero()[:, -1].",
    ],
    "sparse_forward": [
        "One row of blocks at a time: gather the keys of its columns with k[tokens_of(cols, b)], then it is plain "
        "attention of b queries.",
        "lse = scores.logsumexp(-1), and (scores - lse).exp() are the probabilities. Only the diagonal block needs a "
        "mask by token; rows_of leaves out those beyond it.",
    ],
    "sparse_backward": [
        "Walk the rows as in forward. exp(scores - lse) are the probabilities; softmax need not be made again.",
        "dk[there] += ..., not =: other rows read the same block. Rows without blocks keep gradients of zero.",
    ],
    "select_blocks": [
        "k.view(n, block, D).mean(1) are the blocks' means. A token in block r has seen blocks 0 .. r - 1 whole.",
        "softmax of a row of -inf is NaN: nan_to_num(0). Sum over the tokens of a block, forbid what is not past, "
        "topk, scatter, and leave out what topk took from the forbidden.",
    ],
}
