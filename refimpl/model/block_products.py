"""Block-sparse matrices as lists of their blocks: products with one of them, and the softmax of its rows.

A layout [H, n, m] of 0 and 1 says which blocks there are; a matrix is [Z, blocks, block, block], in the order of
`layout.nonzero()`. With s for sparse and d for dense, result first: sdd, dsd and dds. Attention is then
dsd(softmax(sdd(q, k^T)), v), and its backward pass the same three: torch differentiates what is here by itself.

    FLOPs     2 block**2 K a block, instead of 2 M N K         bytes    blocks, and K / block times a dense operand

Child et al. 2019, arXiv:1904.10509, section 5.5 (blocksparse). DeepSpeed: ops/sparse_attention/matmul.py, softmax.py,
until 0.19.6. For attention alone `refimpl/model/sparse.py` never makes the scores.
"""

from typing import Literal

import torch
from torch import Tensor

Mode = Literal["sdd", "dsd", "dds"]


def multiply(
    a: Tensor, b: Tensor, layout: Tensor, block: int, mode: Mode, trans_a: bool = False, trans_b: bool = False
) -> Tensor:
    """a b, each transposed if so asked; dense ones [Z, H, rows, columns]. Sums are in fp32 for 16-bit matrices.

    ValueError where shapes do not fit the layout, which is that of the sparse matrix before it is transposed.
    """
    if mode == "dds":
        return multiply(b, a, layout, block, "dsd", not trans_b, not trans_a).mT
    h, i, j = layout.nonzero(as_tuple=True)
    b = b.mT if trans_b else b  # [Z, H, K, N]
    if mode == "sdd":
        a = a.mT if trans_a else a  # [Z, H, M, K]
        check(layout, block, a.shape[1:3], "rows", b.shape[1::2], "columns")
        return in_rows(a, block)[:, h, i] @ in_rows(b.mT, block)[:, h, j].mT
    heads, rows = layout.shape[0], layout.shape[2 if trans_a else 1]
    if trans_a:
        a, i, j, layout = a.mT, j, i, layout.mT
    if a.shape[1:] != (len(h), block, block):
        raise ValueError(f"a layout of {len(h)} blocks of {block}: the matrix is {list(a.shape)}, [Z, blocks, ..]")
    check(layout.mT, block, b.shape[1:3], "rows", None, "")
    wide = torch.promote_types(a.dtype, torch.float32)
    made = (a @ in_rows(b, block)[:, h, j]).to(wide)  # [Z, blocks, block, N]
    out = made.new_zeros(len(b), heads * rows, block, b.shape[3]).index_add(1, h * rows + i, made)
    return out.to(b.dtype).view(len(b), heads, rows * block, b.shape[3])


def softmax(
    x: Tensor, layout: Tensor, block: int, scale: float = 1.0, added: Tensor | None = None, sees: Tensor | None = None
) -> Tensor:
    """Of every row of x [Z, blocks, block, block], times `scale`, plus `added`; 0 where `sees` is false, and in rows
    that have nothing else. Both of a shape that goes with x's.
    """
    h, i, _ = layout.nonzero(as_tuple=True)
    line, lines = h * layout.shape[1] + i, layout.shape[0] * layout.shape[1]
    scores = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    scores = scores if added is None else scores + added
    scores = scores if sees is None else scores.masked_fill(~sees, -torch.inf)
    highest = scores.detach().amax(3)  # [Z, blocks, block]
    top = highest.new_full((len(x), lines, block), -torch.inf)
    top = top.scatter_reduce(1, line[None, :, None].expand_as(highest), highest, "amax")
    top = top.masked_fill(top == -torch.inf, 0)  # -inf minus -inf would be NaN
    powers = (scores - top[:, line, :, None]).exp()
    total = powers.new_zeros(len(x), lines, block).index_add(1, line, powers.sum(3))
    return (powers / total.masked_fill(total == 0, 1)[:, line, :, None]).to(x.dtype)


def in_rows(x: Tensor, block: int) -> Tensor:
    """x [Z, H, M, K] -> [Z, H, M / block, block, K]."""
    return x.reshape(*x.shape[:2], -1, block, x.shape[3])


def check(layout: Tensor, block: int, rows: torch.Size, of: str, columns: torch.Size | None, also: str) -> None:
    """ValueError unless the dense operand has the layout's heads, and its blocks' rows or columns."""
    needed = [(rows, of, layout.shape[1]), *([(columns, also, layout.shape[2])] if columns is not None else [])]
    for found, what, blocks in needed:
        if tuple(found) != (layout.shape[0], blocks * block):
            raise ValueError(
                f"a layout {list(layout.shape)} of blocks of {block} needs {layout.shape[0]} heads of "
                f"{blocks * block} {what}, not {list(found)}"
            )
