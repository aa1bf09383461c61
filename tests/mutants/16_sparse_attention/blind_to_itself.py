"""A token does not see itself.

task: sparse_forward
says: is a token hidden from itself?
"""

import math

import torch


def rows_of(layout, causal):
    """(row, its columns in ascending order) of every row that reads something; causal: none
    after the row itself.
    """
    read = layout.tril() if causal else layout
    return [(row, cols) for row, line in enumerate(read) if len(cols := line.nonzero().flatten())]


def tokens_of(blocks, b):
    """The numbers of the tokens in these blocks64 [blocks b]."""
    return (blocks[:, None] * b + torch.arange(b)).flatten()


def sparse_forward(q, k, v, layout, causal):
    T, D = q.shape
    b = T // len(layout)
    out, lse = (torch.zeros(T, D), torch.full((T,), -math.inf))
    for row, cols in rows_of(layout, causal):
        i = slice(row * b, (row + 1) * b)
        j = tokens_of(cols, b)
        s = q[i] @ k[j].T / math.sqrt(D)
        if causal:
            s = s.masked_fill(j[None] >= torch.arange(row * b, (row + 1) * b)[:, None], -math.inf)
        lse[i] = torch.logsumexp(s, 1)
        out[i] = (s - lse[i, None]).exp() @ v[j]
    return (out, lse)
