"""What a context axis sends, beside what is counted on real ranks."""

import pytest
import torch
from worlds import run

from refimpl.comm.group import Group
from refimpl.parallel.context.layout import Layout
from refimpl.parallel.context.ring import ring_attention
from refimpl.parallel.context.ulysses import ulysses
from refimpl.plan.context import ring_sent, ulysses_sent
from refimpl.plan.mesh import Mesh
from refimpl.plan.shape import of_size
from refimpl.plan.traffic import traffic

B, TOKENS, D = 2, 6, 8


def counted(how: str, heads: int, shared: int, dtype: torch.dtype) -> int:
    group = Group.world()
    q, k, v = (torch.ones(B, h, TOKENS, D, dtype=dtype, requires_grad=True) for h in (heads, shared, shared))
    layout = Layout(TOKENS * group.size, group.size, zigzag=how == "ring")
    out = ring_attention(q, k, v, group, layout) if how == "ring" else ulysses(q, k, v, group)
    out.sum().backward()
    return sum(group.ledger.sent_bytes().values())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_ring_and_ulysses_send_what_the_formulas_say(ranks: int, dtype: torch.dtype) -> None:
    heads, shared = 2 * ranks, 2
    sent = run(counted, "ring", heads, shared, dtype, ranks=ranks)[0]
    assert sent == ring_sent(B * shared * TOKENS * D, ranks, dtype.itemsize)
    sent = run(counted, "ulysses", heads, shared, dtype, ranks=ranks)[0]
    assert sent == ulysses_sent(B * TOKENS, heads, shared, D, ranks, dtype.itemsize)


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="8 heads over 8 of keys cannot be dealt out to 16 ranks"):
        ulysses_sent(64, 8, 8, 16, 16, 2)


def test_the_planners_context_axis_is_a_ring() -> None:
    shape, mesh = of_size(7e9, context=4096), Mesh(2, 2, 2, 16, cp=4)
    keys = 4096 // 4 * shape.width // 2
    assert traffic(shape, mesh, 0)["context"] == ring_sent(keys, 4, 2, forwards=2) * (shape.layers // 2) * 8
