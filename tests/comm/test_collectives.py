"""The arithmetic below the collectives, for any sizes and values, drawn by hypothesis; no process is started."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from refimpl.comm.collectives import BLOCK, Op, chunk_sizes, ordered_reduce

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
OPS: st.SearchStrategy[Op] = st.sampled_from(["sum", "mean", "max"])
LENGTHS = st.one_of(st.integers(0, 9), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3]))


@given(st.integers(0, 10**12), st.integers(1, 1000))
def test_chunks_deal_out_all_elements_as_evenly_as_can_be(numel: int, ranks: int) -> None:
    sizes = chunk_sizes(numel, ranks)
    assert len(sizes) == ranks
    assert sum(sizes) == numel
    assert max(sizes) - min(sizes) <= 1
    assert all(a >= b for a, b in pairwise(sizes))


def sequential(rows: list[Tensor], op: Op) -> Tensor:
    """Row after row, low precision in fp32, rounded once at the end; a mean divides the sum once."""
    low = rows[0].dtype in (torch.bfloat16, torch.float16)
    wide = [row.float() if low else row for row in rows]
    total = wide[0]
    for row in wide[1:]:
        total = torch.maximum(total, row) if op == "max" else total + row
    return (total / len(rows) if op == "mean" else total).to(rows[0].dtype)


@given(LENGTHS, st.integers(1, 5), DTYPES, OPS, st.booleans(), st.integers(0, 2**31), st.data())
def test_an_ordered_reduction_is_the_sequential_one_bit_for_bit(
    numel: int, ranks: int, dtype: torch.dtype, op: Op, in_place: bool, seed: int, data: st.DataObject
) -> None:
    """On whichever rank, over block boundaries, into its own chunk or another tensor."""
    rank = data.draw(st.integers(0, ranks - 1), label="rank")
    dice = torch.Generator().manual_seed(seed)
    powers = 10.0 ** torch.randint(-3, 4, (ranks, numel), generator=dice)  # so that the order of additions shows
    rows = list((torch.randn(ranks, numel, generator=dice) * powers).to(dtype))
    expected = sequential(rows, op)
    given = [row.clone() for row in rows]
    out = given[rank] if in_place else torch.empty_like(given[rank])
    ordered_reduce(out, given, rank, op)
    assert torch.equal(out, expected)
    assert all(torch.equal(given[i], row) for i, row in enumerate(rows) if not in_place or i != rank)
