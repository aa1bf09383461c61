"""What a context axis sends, beside what is counted on real ranks."""

import pytest
import torch
from worlds import run

from refimpl.comm.group import Group
from refimpl.parallel.context.layout import Layout
from refimpl.parallel.context.ring import ring_attention
from refimpl.parallel.context.ulysses import ulysses
from refimpl.plan.context import on_axes, ring_sent, ulysses_sent
from refimpl.plan.mesh import Mesh, traffic
from refimpl.plan.shape import of_size

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


def test_without_a_context_axis_it_is_the_planners_traffic() -> None:
    shape = of_size(7e9, context=4096)
    parts = traffic(shape, Mesh(2, 2, 4, 16))
    found = on_axes(shape, {"dp": 2, "pp": 2, "tp": 4}, 16)
    assert found == {"dp": parts["data"], "pp": parts["pipeline"], "cp": 0, "tp": parts["tensor"]}


def test_a_context_axis_takes_a_share_of_what_tokens_cost_and_adds_to_the_replicas() -> None:
    shape = of_size(7e9, context=4096)
    one, cut = (on_axes(shape, {"dp": 2, "pp": 2, "cp": cp, "tp": 2}, 16) for cp in (1, 4))
    assert cut["tp"] * 4 == one["tp"]
    assert cut["pp"] * 4 == one["pp"]
    assert cut["dp"] > one["dp"]
    keys = 4096 // 4 * shape.width // 2
    assert cut["cp"] == ring_sent(keys, 4, 2, forwards=2) * (shape.layers // 2) * 8
    with pytest.raises(ValueError, match="4096 tokens over 3 context ranks"):
        on_axes(shape, {"cp": 3}, 16)
