"""What cards say of pipelines and no other test shows."""

import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from refimpl.bank.card import Order
from refimpl.bank.load import load
from refimpl.parallel.pipeline.clock import alive, bubble, play, share
from refimpl.parallel.pipeline.schedules.named import schedule


def test_the_order_of_the_card_is_the_tables() -> None:
    card = load()["pipeline-order-1f1b"]
    assert isinstance(card, Order)
    words = {"F": "Forward", "B": "Backward"}
    order = schedule("1f1b", 3, 4).orders[0]
    assert list(card.items) == [f"{words[op.kind]} of micro-batch {op.micro}" for op in order]


def test_with_one_micro_batch_one_rank_computes_at_a_time() -> None:
    spans = sorted(play(schedule("gpipe", 4, 1)).values())
    assert all(a.end == b.begin for a, b in pairwise(spans))
    overlapping = sorted(play(schedule("gpipe", 4, 2)).values())
    assert any(a.end > b.begin for a, b in pairwise(overlapping))


def test_below_p_micro_batches_the_first_stage_holds_as_many_as_in_gpipe() -> None:
    for m in range(1, 9):
        assert alive(schedule("1f1b", 8, m))[0] == alive(schedule("gpipe", 8, m))[0] == m
    assert alive(schedule("1f1b", 8, 9))[0] < alive(schedule("gpipe", 8, 9))[0]


def test_backward_starts_at_the_edge_of_an_output_that_is_gone() -> None:
    layer, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    out = layer(x)
    expected = torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)
    edge, gone = get_gradient_edge(out), weakref.ref(out)
    del out
    assert gone() is None
    torch.autograd.backward(edge, torch.ones(2, 3))
    assert x.grad is not None
    assert torch.equal(x.grad, expected[0])


def test_batch_norm_sees_a_micro_batch_and_layer_norm_does_not_care() -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 3)
    for norm, same in ((nn.BatchNorm1d(3), False), (nn.LayerNorm(3), True)):
        parts = torch.cat([norm(part) for part in batch.chunk(4)])
        assert torch.allclose(parts, norm(batch)) == same


def test_interleaved_the_first_rank_holds_the_cards_chunks() -> None:
    for p in (4, 8):
        for v in (2, 3, 4):
            assert alive(schedule("interleaved", p, 2 * p, v))[0] == (v - 1) * p + 2 * (p - 1) + 1


def test_interleaved_the_bubble_is_the_cards() -> None:
    for p, m, v in ((4, 16, 2), (4, 16, 4), (8, 16, 2), (16, 32, 4)):
        idle = (p - 1) / v / (m + (p - 1) / v)
        assert share(schedule("interleaved", p, m, v)) == pytest.approx(idle)


def test_dualpipe_trades_copies_and_one_more_micro_batch_for_a_short_bubble() -> None:
    for p in (4, 8):
        tables = {name: schedule(name, p, 2 * p) for name in ("1f1b", "zb-h1", "dualpipe")}
        holders = [{op.stage for op in order} for order in tables["dualpipe"].orders]
        assert all(len(stages) == 2 for stages in holders)
        assert all(sum(stage in stages for stages in holders) == 2 for stage in range(p))
        assert alive(tables["dualpipe"]) == [p + 1] * p
        idle = [bubble(tables[name]) for name in ("dualpipe", "zb-h1", "1f1b")]
        assert idle == [p / 2 - 1, p - 1, 3 * (p - 1)]  # of operations as long as a forward
