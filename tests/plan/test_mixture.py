"""Sizes of mixtures by formula: what papers print, and what a model built of these parts has."""

import pytest
import torch

from refimpl.model.gates import Routing
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.model.moe import mixtures
from refimpl.plan.expert import COUNT, even_sent, sent
from refimpl.plan.mixture import GSHARD, PUBLISHED, Mixture, gshard


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_published(name: str) -> None:
    model, total, active = PUBLISHED[name]
    assert model.total / 1e9 == pytest.approx(total, rel=1e-3)
    if active is not None:  # DeepSeek-V3's leaves out the embedding, 0.9 billion
        assert model.active / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(("experts", "blocks"), GSHARD)
def test_gshards_are_as_rounded_in_its_table(experts: int, blocks: int) -> None:
    assert gshard(experts, blocks).total / 1e9 == pytest.approx(GSHARD[experts, blocks], rel=0.07)


@pytest.mark.parametrize("forwards", [1, 2])
def test_even_loads_send_what_the_planner_takes_them_for(forwards: int) -> None:
    ep, experts, each = 2, 4, 3  # rows of a rank for an expert
    found = sent([[each] * experts] * ep, 1, 5, 2, forwards)
    assert found["tokens"] == even_sent(each * experts, 1, 5, ep, 2, forwards)
    assert found["tokens per expert"] == forwards * COUNT * experts * (ep - 1), "told anew with each forward"


@pytest.mark.parametrize(("experts", "k"), [(4, 1), (6, 2)])
def test_a_gpt_with_mixtures_has_as_many(experts: int, k: int) -> None:
    config = GPTConfig(vocab=16, context=8, width=12, layers=3, heads=2)
    with torch.device("meta"):
        dense, model = GPT(config), mixtures(GPT(config), experts, Routing(k=k))
    mlps = sum(p.numel() for block in dense.blocks for p in block.mlp.parameters())
    biases = 3 * experts * 5 * config.width  # of the experts' two layers, which the formula leaves out
    rest = sum(p.numel() for p in dense.parameters()) - mlps + 3 * experts * config.width
    formula = Mixture(3, experts, k, config.width, 4 * config.width, rest)
    assert sum(p.numel() for p in model.parameters()) == formula.total + biases
    assert formula.total - formula.active == 3 * (experts - k) * 2 * 4 * config.width**2
