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
    raise NotImplementedError("fixed_layout")


def bigbird_layout(n: int, width: int, first: int, each: int, rng: random.Random) -> Tensor:
    """BigBird's pattern, of an encoder: bool [n, n], the union of

    - a window: `width` (odd) blocks around one's own, as far as there are so many;
    - global blocks: the first `first` are read by every row, and read everything;
    - random blocks: for each row, from the first to the last, rng.sample(range(n), each).
    """
    raise NotImplementedError("bigbird_layout")


def layers_to_see(layout: Tensor) -> Tensor:
    """How many layers it takes until a block has heard of another: int64 [n, n]; -1 where it
    never does.

    In one layer row r takes from the blocks that it reads. In the next it takes what those have
    taken, and so on. A block knows itself after 0 layers. With a window of 3 blocks, [0, 2] is
    2. The layout is the same in all layers.
    """
    raise NotImplementedError("layers_to_see")


def block_lists(layout: Tensor) -> tuple[Tensor, Tensor]:
    """A layout [heads, n, n] as a kernel walks it: (starts int64 [heads n + 1], blocks int64
    [present]).

    The rows of all heads, one after the other. Row r of head h reads blocks[starts[h n + r] :
    starts[h n + r + 1]], in ascending order; a row may read nothing. starts ends with the
    number of blocks present, which can be above 2^24: count in whole numbers. No loop over
    rows: a layout has many thousands of them.
    """
    raise NotImplementedError("block_lists")


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
    raise NotImplementedError("sparse_forward")


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
    raise NotImplementedError("sparse_backward")


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
    raise NotImplementedError("select_blocks")
