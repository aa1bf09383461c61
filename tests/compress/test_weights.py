"""Weights on a grid, masks and smaller layers: what is rounded, what is kept, and where the gradient goes."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from refimpl.compress.weights.clean import keep_inputs, keep_outputs, settle
from refimpl.compress.weights.grid import on_grid
from refimpl.compress.weights.layers import become, kind
from refimpl.compress.weights.masks import Part, Prune, largest
from refimpl.compress.weights.quantize import MOMENTUM, Quantize, QuantizeInput


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 8), st.booleans(), st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_every_row_has_its_own_levels(bits: int, symmetric: bool, groups: int, length: int, seed: int) -> None:
    x = numbers(groups * length, seed=seed)
    there = on_grid(x, bits, symmetric, groups)
    for row, rounded in zip(x.view(groups, -1), there.view(groups, -1), strict=True):
        assert torch.equal(rounded, on_grid(row, bits, symmetric))
        assert len(rounded.unique()) <= 2**bits
        if bits >= 3:
            step = (2 * row.abs().max() if symmetric else row.max() - row.min()) / 2**bits
            off, top = (row - rounded).abs(), row.max() if symmetric else row.min() + (2**bits - 1) * step
            assert off.max() <= step * (1.001 if symmetric else 1.501)
            assert (off <= step * 0.501)[row < top - step].all()


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_the_gradient_passes_as_if_nothing_had_been_rounded(bits: int) -> None:
    x, weight = numbers(4, 6).requires_grad_(), numbers(4, 6, seed=1)
    (on_grid(x, bits, groups=2) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_one_and_two_bits_by_hand() -> None:
    x = torch.tensor([3.0, -1.0, 0.5, -2.5])
    assert on_grid(x, 1).tolist() == [1.75, -1.75, 1.75, -1.75]
    assert on_grid(x, 2).tolist() == [2.75, 0, 0, -2.75]  # 0.7 * 1.75 = 1.225


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_a_row_of_one_number_stays_finite(bits: int, symmetric: bool) -> None:
    assert on_grid(torch.zeros(2, 3), bits, symmetric, 2).tolist() == [[0, 0, 0], [0, 0, 0]]
    same = on_grid(torch.full((4,), -0.7), bits, symmetric)
    assert same.isfinite().all()
    if not symmetric and bits > 2:
        assert same.tolist() == torch.full((4,), -0.7).tolist()
    assert on_grid(torch.empty(0), bits, symmetric).numel() == 0
    assert on_grid(torch.tensor([1.0, math.nan]), bits, symmetric).isnan().any()


def test_noise_makes_rounding_unbiased() -> None:
    x, draws = torch.tensor([1.0, 0.3, -0.2]), 4000
    noise = torch.rand(draws, 3, generator=torch.Generator().manual_seed(0)) - 0.5
    mean = torch.stack([on_grid(x, 3, noise=each) for each in noise]).mean(0)
    assert (mean - x)[1:].abs().max() < 0.01
    assert on_grid(x, 3).tolist() == [0.75, 0.25, -0.25]


def test_groups_that_would_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="10 numbers cannot be cut into 4 groups"):
        on_grid(torch.zeros(10), 4, groups=4)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=20), st.floats(0.01, 1))
def test_the_largest_scores_are_kept_the_first_of_equals(scores: list[int], share: float) -> None:
    mask = largest(torch.tensor(scores, dtype=torch.float32), share)
    ranked = sorted(range(len(scores)), key=lambda i: -scores[i])[: math.ceil(share * len(scores))]
    assert mask.nonzero().view(-1).tolist() == sorted(ranked)


def test_scores_learn_what_their_part_is_worth() -> None:
    layer = become(nn.Linear(6, 4))
    layer.add("row_pruning", Prune(0, "row", 0.5, learned=True))
    layer.step = 0
    x = numbers(3, 6)
    layer(x).sum().backward()
    whole = nn.functional.linear(x, layer.weight, layer.bias)
    mask = largest(layer.row_mask_scores, 0.5)
    assert torch.equal(layer(x), whole * mask.view(-1))
    assert layer.row_mask_scores.grad.view(-1) == pytest.approx(whole.sum(0).tolist(), abs=1e-6)  # also of what is out


def test_bits_go_one_by_one_each_after_twice_as_many_steps() -> None:
    rounding = Quantize(offset=5, bits=4, start_bits=8, period=2)
    assert [rounding.now(step)[0] for step in range(18)] == [8] * 2 + [7] * 2 + [6] * 4 + [5] * 8 + [4] * 2
    assert Quantize(0, 4, 4, period=0).now(0) == (4, 0)
    mixed = Quantize(0, 8, 8, ratio=0.25)
    weight = numbers(8)
    shares = [((mixed.at(s)(weight) - on_grid(weight, 8)) / (weight - on_grid(weight, 8)))[0] for s in range(5)]
    assert [round(float(share), 2) for share in shares] == [0.75, 0.5, 0.25, 0, 0]


def test_nothing_is_done_before_its_step_nor_where_nobody_counts() -> None:
    layer = become(nn.Linear(4, 4))
    x, before = numbers(2, 4), layer.weight.detach().clone()
    layer.add("activation_quantization", QuantizeInput(2, 4))
    layer.add("weight_quantization", Quantize(1, 2, 2))
    assert list(layer.techniques) == ["weight_quantization", "activation_quantization"]
    plain = nn.functional.linear(x, before, layer.bias)
    for step, weight, fed in ((-1, before, x), (0, before, x), (1, on_grid(before, 2), x)):
        layer.step = step
        assert torch.equal(layer(x), nn.functional.linear(fed, weight, layer.bias))
    layer.step = 2
    each = torch.cat([on_grid(row, 4)[None] for row in x])  # a range a token
    assert torch.equal(layer(x), nn.functional.linear(each, on_grid(before, 2), layer.bias))
    assert not torch.equal(layer(x), plain)
    assert torch.equal(layer.weight, before)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    with pytest.raises(ValueError, match="two of its groups"):
        layer.add("weight_quantization", Quantize(0, 8, 8))


def test_a_range_that_was_seen_is_kept_for_evaluation() -> None:
    layer = become(nn.Linear(2, 2, bias=False))
    layer.add("activation_quantization", QuantizeInput(0, 4, symmetric=False, static=True))
    layer.step, seen = 0, None
    for x in (torch.tensor([[-1.0, 3.0]]), torch.tensor([[0.0, 5.0]])):
        layer(x)
        now = torch.tensor([x.min(), x.max()])
        seen = now if seen is None else seen * MOMENTUM + now * (1 - MOMENTUM)
    assert layer.state_dict()["activation_quantizer.x_min_max"].tolist() == pytest.approx(seen.tolist())
    layer.eval()(torch.tensor([[-100.0, 100.0]]))
    assert layer.activation_quantizer.x_min_max.tolist() == pytest.approx(seen.tolist())
    assert layer.fed(torch.tensor([[-100.0, 100.0]])).abs().max() < 6  # moved to the ends


@pytest.mark.parametrize("again", [True, False])
def test_a_range_moves_once_where_a_checkpoint_computes_again(again: bool) -> None:
    layer = become(nn.Linear(2, 2))
    layer.add("activation_quantization", QuantizeInput(0, 4, static=True))
    layer.step = 0
    for x in (torch.tensor([[-1.0, 3.0]]), torch.tensor([[0.0, 5.0]])):
        x.requires_grad_()
        (checkpoint(layer, x, use_reentrant=False) if again else layer(x)).sum().backward()
    assert layer.activation_quantizer.x_min_max.tolist() == pytest.approx([-0.95, 3.1])


class Attention(nn.Module):
    """Four heads of 2 over a width of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.heads = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).view(len(x), self.heads, -1).transpose(0, 1) for f in (self.q, self.k, self.v))
        mixed = (q @ k.transpose(1, 2)).softmax(-1) @ v  # [heads, tokens, 2]
        return self.o(mixed.transpose(0, 1).reshape(len(x), -1))


def test_rows_heads_and_channels_come_out_and_the_answer_stays() -> None:
    mlp = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6, bias=False))
    cnn = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 3))
    attention = Attention()
    cases: list[tuple[nn.Module, str, Part, list[nn.Module], torch.Tensor]] = [
        (mlp, "0", "row", [mlp[2]], numbers(5, 6)),
        (cnn, "0", "channel", [cnn[1], cnn[3]], numbers(2, 2, 7, 7)),
        (attention, "o", "head", [attention.q, attention.k, attention.v], numbers(5, 8)),
    ]
    for model, name, part, related, x in cases:
        method = f"{part}_pruning"
        layer = become(model.eval().get_submodule(name))
        layer.add(method, Prune(0, part, 0.5, learned=True, heads=4))
        layer.step = 0
        if part == "channel":
            model[1].bias.data.zero_()  # else a channel that is gone would say something behind its BatchNorm
            model[1].running_mean.zero_()
        masked = model(x)
        kept = settle(layer, method, shrink=True)
        for other in related:
            (keep_outputs if part == "head" else keep_inputs)(other, kept)
        attention.heads = 2 if part == "head" else 4
        assert torch.allclose(model(x), masked, atol=1e-6)
        assert 2 * int(kept.sum()) == len(kept)
        assert not layer.techniques
        assert not [key for key in model.state_dict() if "mask" in key or "scores" in key]
    assert [tuple(p.shape) for p in mlp.parameters()] == [(5, 6), (5,), (6, 5)]
    assert [tuple(m.weight.shape) for m in (cnn[0], cnn[1], cnn[3])] == [(3, 2, 3, 3), (3,), (3, 3, 3, 3)]
    assert [tuple(m.weight.shape) for m in (attention.o, attention.q)] == [(8, 4), (4, 8)]
    assert str(mlp[0]) == "CompressedLinear(in_features=6, out_features=5, bias=True)"


def test_without_related_layers_zeros_stay_in_place() -> None:
    layer = become(nn.Linear(4, 6))
    layer.add("row_pruning", Prune(0, "row", 0.5, learned=False))
    layer.add("sparse_pruning", Prune(0, "number", 0.25, learned=False))
    rows = layer.weight.detach().abs().sum(1).argsort(descending=True)[:3]
    settle(layer, "sparse_pruning")
    settle(layer, "row_pruning")
    assert layer.weight.shape == (6, 4)
    assert layer.bias.nonzero().view(-1).tolist() == sorted(rows.tolist())
    assert int((layer.weight != 0).sum()) <= 6


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight \(4, 6\) of a Linear cannot lose some of 4 parts"):
        keep_inputs(nn.Linear(6, 4), torch.tensor([True, False, True, True]))
    with pytest.raises(ValueError, match="Conv2d cannot lose"):
        keep_inputs(nn.Conv2d(4, 4, 3, groups=2), torch.tensor([True, False]))


def test_a_layer_keeps_its_parameters_and_what_computes_otherwise_is_left_alone() -> None:
    class Mine(nn.Linear):
        pass

    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input

    layer = Mine(2, 2)
    weight = layer.weight
    assert isinstance(become(layer), Mine)
    assert layer.weight is weight
    assert become(layer) is layer
    attention = nn.MultiheadAttention(4, 2)
    assert [kind(m) for m in (nn.Linear(1, 1), Own(1, 1), attention.out_proj, nn.ReLU())] == [
        nn.Linear,
        None,
        None,
        None,
    ]


class Named(nn.Linear):
    """A model's own subclass, which pickle must find."""


def test_a_layer_of_an_own_class_goes_through_pickle_and_deepcopy() -> None:
    layer = become(Named(3, 2))
    layer.add("sparse_pruning", Prune(0, "number", 0.5, learned=False))
    layer.step, x = 0, numbers(2, 3)
    for again in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert type(again) is type(become(Named(1, 1))) is type(layer)
        assert torch.equal(again(x), layer(x))
        assert list(again.state_dict()) == list(layer.state_dict())


def test_a_weight_that_is_computed_from_others_is_left_alone() -> None:
    assert kind(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))) is None
    pruned = prune.l1_unstructured(nn.Linear(2, 2), "weight", 0.5)  # type: ignore[no-untyped-call]
    assert kind(pruned) is None


@pytest.mark.parametrize("static", [True, False])
def test_an_expert_without_tokens_and_a_range_not_yet_seen(static: bool) -> None:
    layer = become(nn.Linear(4, 4))
    layer.add("activation_quantization", QuantizeInput(0, 4, static=static))
    layer.step, x = 0, numbers(2, 4)
    assert layer(torch.empty(0, 4)).shape == (0, 4)
    assert torch.equal(layer.eval().fed(x), x) == static


def test_sixteen_bits_are_rounded_as_if_they_were_more() -> None:
    x = (numbers(1024, 1024) * 0.2).half()  # whose sizes sum to more than fp16 holds
    for bits, symmetric in ((1, True), (2, True), (8, True), (16, False)):
        assert torch.equal(on_grid(x, bits, symmetric), on_grid(x.float(), bits, symmetric).half())


def test_an_embedding_with_a_largest_norm_has_it_behind_rounding() -> None:
    layer = become(nn.Embedding(5, 4, max_norm=0.5))
    nn.init.uniform_(layer.weight, 1, 2)  # every row is longer than that
    layer.add("weight_quantization", Quantize(0, 4, 4, groups=5))
    layer.step = 0
    out = layer(torch.arange(5))
    out.sum().backward()
    assert out.norm(dim=1).tolist() == pytest.approx([0.5] * 5, abs=1e-3)
    assert layer.weight.grad is not None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's own call
def test_a_compiled_layer_is_compiled_anew_where_something_changes_and_not_each_step() -> None:
    layer = become(nn.Linear(4, 4))
    layer.add("weight_quantization", Quantize(offset=2, bits=6, start_bits=8, period=3))
    compiled_anew: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled_anew.append(layer.step)
        return graph

    compiled = torch.compile(layer, backend=backend)
    for step in range(12):
        layer.step = step
        weight = layer.weight if step < 2 else on_grid(layer.weight, 8 if step < 5 else 7 if step < 8 else 6)
        assert torch.equal(compiled(torch.eye(4)), nn.functional.linear(torch.eye(4), weight, layer.bias))
    assert compiled_anew == [0, 2, 5, 8]
