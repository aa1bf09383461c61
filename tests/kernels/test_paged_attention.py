"""Decoding over pages beside float64: lengths, pages of any size, a shuffled table; each key read once for a group."""

import pytest
import torch
from agreement import BOUND, error_of
from torch import Tensor

from refimpl.kernels.count import counted
from refimpl.kernels.language import INTERPRETED
from refimpl.kernels.paged_attention import paged_attention, reference


def cache(
    device: torch.device, dtype: torch.dtype, lengths: list[int], heads: int, shared: int, width: int, page: int
) -> tuple[Tensor, ...]:
    """q, keys, values, table, lengths; the table's unused entries name no page."""
    pages = max(1, -(-max(lengths) // page))
    count = len(lengths) * pages
    table = torch.randperm(count).view(len(lengths), pages).int()
    table[torch.arange(pages) * page >= torch.tensor(lengths)[:, None]] = -7
    made = (
        torch.randn(*shape, device=device).to(dtype)
        for shape in ((len(lengths), heads, width), *[(count, page, shared, width)] * 2)
    )
    return *made, table.to(device), torch.tensor(lengths, device=device)  # fmt: skip


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize(
    ("lengths", "heads", "shared", "width", "page"),
    [([700, 0, 33], 4, 2, 40, 16), ([1, 300], 2, 2, 64, 7), ([50], 20, 1, 17, 1), ([33], 70, 1, 16, 8)],
    ids=str,
)
def test_equals_float64(
    device: torch.device, dtype: torch.dtype, lengths: list[int], heads: int, shared: int, width: int, page: int
) -> None:
    q, keys, values, table, used = cache(device, dtype, lengths, heads, shared, width, page)
    exact = reference(q.double(), keys.double(), values.double(), table, used, width**-0.5)
    out = paged_attention(q, keys, values, table, used)
    assert out.dtype == dtype
    assert error_of(out, exact) <= BOUND[dtype]


@pytest.mark.skipif(not INTERPRETED, reason="counted under the interpreter")
def test_each_key_is_read_once(device: torch.device) -> None:
    lengths = [300, 20]
    inputs = cache(device, torch.float32, lengths, 6, 2, 24, 16)
    with counted(trace=True) as c:
        paged_attention(*inputs)
    assert c.loaded_from["keys"] == c.loaded_from["values"] == sum(lengths) * 2 * 24 * 4
    assert not c.races()
    assert not c.outside


def test_nothing_gives_nothing(device: torch.device) -> None:
    q, keys, values, table, used = cache(device, torch.float32, [0, 0], 2, 1, 8, 4)
    assert torch.equal(paged_attention(q, keys, values, table, used), torch.zeros_like(q))
    assert paged_attention(q[:0], keys, values, table[:0], used[:0]).shape == (0, 2, 8)


def test_what_cannot_be_is_refused(device: torch.device) -> None:
    q, keys, values, table, used = cache(device, torch.float32, [5, 3], 4, 2, 8, 4)
    with pytest.raises(ValueError, match=r"table \[1, 2\], lengths \[2\]; \[2, pages\] and \[2\] are needed"):
        paged_attention(q, keys, values, table[:1], used)
    with pytest.raises(ValueError, match="4 heads of 8 over 3"):
        paged_attention(q, torch.ones(4, 4, 3, 8, device=device), torch.ones(4, 4, 3, 8, device=device), table, used)
    with pytest.raises(ValueError, match="has no gradient"):
        paged_attention(q.clone().requires_grad_(), keys, values, table, used)
    if q.is_cpu:
        with pytest.raises(ValueError, match=r"lengths \[9, 3\]; the table has 2 pages of 4"):
            paged_attention(q, keys, values, table, torch.tensor([9, 3]))
        with pytest.raises(ValueError, match="page is not among the 4 that there are"):
            paged_attention(q, keys, values, table + 4, used)
