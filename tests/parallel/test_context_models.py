"""Whole models over part of a sequence on each rank: a GPT under ZeRO, and transformers' Llama with grouped heads."""

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from worlds import run

from refimpl.comm.group import Group
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.parallel.context.layout import Layout
from refimpl.parallel.context.loss import cross_entropy
from refimpl.parallel.context.swap import attention_function, context_parallel
from refimpl.zero.zero2 import Zero2

SMALL = GPTConfig(vocab=29, context=24, width=24, layers=2, heads=6)
STEPS = 3


def text() -> Tensor:
    return torch.randint(SMALL.vocab, (2, SMALL.context + 1), generator=torch.Generator().manual_seed(3))


def trained(how: str, zigzag: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Runs on every rank: (losses over all tokens, weights)."""
    group = Group.world()
    torch.manual_seed(0)
    layout = Layout(SMALL.context, group.size, zigzag)
    model = context_parallel(GPT(SMALL), group, layout, how)
    stage = Zero2(model, torch.optim.SGD(model.parameters(), lr=0.5), group)
    tokens = text()
    losses = []
    for _ in range(STEPS):
        loss = cross_entropy(
            model(layout.cut(tokens[:, :-1], group.rank)), layout.cut(tokens[:, 1:], group.rank), group
        )
        stage.backward(loss)
        stage.step()
        value = loss.detach().reshape(1).clone()
        group.all_reduce(value, "mean")
        losses.append(value.item())
    return losses, {name: stage.full_parameter(name) for name in stage.names.values()}


@pytest.mark.parametrize(
    ("how", "zigzag", "ranks"),
    [("ring", False, 3), ("ring", True, 2), ("ring", True, 4), ("ulysses", False, 2), ("ulysses", False, 3)],
)
def test_a_gpt_learns_what_it_learns_alone(how: str, zigzag: bool, ranks: int) -> None:
    losses, weights = run(trained, how, zigzag, ranks=ranks)[0]
    torch.manual_seed(0)
    model = GPT(SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for found in losses:
        loss = model(text()[:, :-1], text()[:, 1:])
        assert found == pytest.approx(loss.item(), rel=1e-6)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert weights.keys() == dict(model.named_parameters()).keys(), "names stay the plain model's"
    for name, p in model.named_parameters():
        torch.testing.assert_close(weights[name], p.detach(), rtol=1e-4, atol=1e-6)


def llama(how: str) -> list[Tensor]:
    """Runs on every rank: its part of the logits, and the mean gradient of one weight."""
    from transformers import AttentionInterface

    group, model = Group.world(), small_llama()
    layout = Layout(24, group.size, zigzag=how == "ring")
    AttentionInterface.register(f"over ranks: {how}", attention_function(group, layout, how))
    model.set_attn_implementation(f"over ranks: {how}")
    tokens = text()[:, :24]
    ids, positions = layout.cut(tokens, group.rank), layout.positions(group.rank)[None]
    logits = model(input_ids=ids, position_ids=positions).logits
    cross_entropy(logits, layout.cut(text()[:, 1:], group.rank), group).backward()
    grad = model.model.layers[0].self_attn.k_proj.weight.grad
    group.all_reduce(grad, "mean")
    return [logits.detach(), grad]


def small_llama() -> "torch.nn.Module":
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=29, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)  # type: ignore[no-any-return]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers (the hf extra)")
@pytest.mark.parametrize(("how", "ranks"), [("ring", 2), ("ring", 3), ("ulysses", 2), ("ulysses", 4)])
def test_transformers_llama_with_grouped_heads(how: str, ranks: int) -> None:
    found = run(llama, how, ranks=ranks)
    model = small_llama()
    logits = model(input_ids=text()[:, :24]).logits
    F.cross_entropy(logits.flatten(0, 1), text()[:, 1:].flatten()).backward()
    layout = Layout(24, ranks, zigzag=how == "ring")
    torch.testing.assert_close(layout.join([part for part, _ in found]), logits.detach(), rtol=1e-4, atol=1e-5)
    expected = model.model.layers[0].self_attn.k_proj.weight.grad
    torch.testing.assert_close(found[0][1], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dropout": 0.1}, "no dropout"),
        ({"mask": torch.ones(1, 6)}, "a mask is not known"),
        ({"sliding_window": 4}, "a sliding window is not known"),
        ({"softcap": 30.0}, "a softcap is not known"),
        ({"is_causal": False}, "attention both ways is not known"),
    ],
)
def test_what_is_not_causal_attention_is_refused(options: dict[str, Any], says: str) -> None:
    module, q = torch.nn.Module(), torch.zeros(1, 2, 6, 4)
    attention = attention_function(Group(None), Layout(6, 1, zigzag=False))
    assert attention(module, q, q, q, None, scaling=0.5)[0].shape == (1, 6, 2, 4)
    module.is_causal = options.pop("is_causal", True)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=says):
        attention(module, q, q, q, options.pop("mask", None), **options)


@pytest.mark.parametrize("how", ["ring", "ulysses"])
def test_scores_are_scaled_as_the_caller_says(how: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    found = attention_function(Group(None), Layout(6, 1), how)(torch.nn.Module(), q, k, v, None, scaling=0.3)[0]
    torch.testing.assert_close(found.transpose(1, 2), F.scaled_dot_product_attention(q, k, v, None, 0, True, scale=0.3))


def test_whoever_calls_says_whether_attention_is_causal() -> None:
    """Over the module, as in transformers; where neither says, it is."""
    module, q = torch.nn.Module(), torch.zeros(1, 2, 6, 4)
    attention = attention_function(Group(None), Layout(6, 1))
    for of_module, said in ((True, False), (None, False), (False, None)):
        module.is_causal = of_module  # type: ignore[assignment]
        with pytest.raises(ValueError, match="attention both ways is not known"):
            attention(module, q, q, q, None, is_causal=said)
    module.is_causal = False  # type: ignore[assignment]
    assert attention(module, q, q, q, None, is_causal=True)[0].shape == (1, 6, 2, 4)
