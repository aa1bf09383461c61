"""The mixture of experts against a loop over tokens, GShard's dense one, and transformers' blocks."""

import copy
import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from refimpl.model.experts import Experts, StackedExperts
from refimpl.model.gates import Gate, Routing
from refimpl.model.gpt import GPT, MLP, GPTConfig
from refimpl.model.moe import MoE, anew, layers, mix_dense, mixtures
from refimpl.model.routes import Routes

WIDTH = 16
# Sums of k products, added in another order: a rounding or two of fp32.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
SHAPE = GPTConfig(vocab=32, context=16, width=WIDTH, layers=2, heads=2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))


def moe(experts: int = 4, routing: Routing | None = None, **more: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(Gate(WIDTH, experts, routing or Routing(k=2)), Experts([mlp() for _ in range(experts)]), **more)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(1))


def grads(module: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]


ROUTINGS = [
    Routing(k=1),
    Routing(k=2),
    Routing(k=3, capacity_factor=0.6, min_capacity=1, drop="probs"),
    Routing(k=2, capacity_factor=0.5, min_capacity=0, drop="choice"),
    Routing(k=2, by="experts"),
    Routing(k=2, score="sigmoid", scale=2.5),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda r: f"{r.by} {r.k} {r.drop} {r.score}")
def test_it_is_the_loop_over_tokens_and_gshards_dense_one(routing: Routing) -> None:
    layer, x = moe(routing=routing), tokens(3, 7).requires_grad_()
    dense, loop = copy.deepcopy(layer), copy.deepcopy(layer)
    dense.mix = mix_dense
    out_grad = tokens(3, 7).flip(0)
    results = []
    for each in (layer, dense):
        y = each(x)
        (grad,) = torch.autograd.grad(y, x, out_grad, retain_graph=True)
        y.backward(out_grad)
        results.append([y.detach(), grad, *grads(each)])
    flat = x.view(-1, WIDTH)
    routes = loop.gate(flat)
    rows = []
    for t in range(21):
        answers = [
            routes.weights[t, j] * loop.experts[str(int(routes.indices[t, j]))](flat[t])  # type: ignore[index]
            for j in range(routes.indices.shape[1])
            if routes.kept[t, j]
        ]
        rows.append(torch.stack(answers).sum(0) if answers else 0 * flat[t])
    y = torch.stack(rows).view_as(x)
    (grad,) = torch.autograd.grad(y, x, out_grad, retain_graph=True)
    y.backward(out_grad)
    results.append([y.detach(), grad, *grads(loop)])
    for ours, theirs in [(results[0], results[1]), (results[0], results[2])]:
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)


def test_an_expert_without_tokens_and_one_with_all() -> None:
    layer = moe(experts=3, routing=Routing(k=1))
    with torch.no_grad():
        layer.gate.weight.zero_()  # a tie everywhere: all to expert 0
    x = tokens(10)
    y = layer(x)
    y.sum().backward()
    torch.testing.assert_close(y, layer.experts["0"](x) / 3, **CLOSE)  # type: ignore[index]
    assert layer.routes is not None
    assert layer.routes.rows.sizes == [10, 0, 0]
    for expert, used in zip(layer.experts.values(), [True, False, False], strict=True):  # type: ignore[operator]
        assert all(p.grad is not None and p.grad.any() == used for p in expert.parameters())
    assert layer(x[:0]).shape == (0, WIDTH)


def test_dropped_tokens_are_zero_and_unused_ones_too() -> None:
    layer = moe(routing=Routing(k=1, capacity_factor=1e-6, min_capacity=1))
    y = layer(tokens(40))
    assert layer.routes is not None
    assert (y.abs().sum(1) > 0).sum() == (layer.routes.counts > 0).sum()
    used = torch.arange(40).view(2, 20) % 2
    assert torch.equal((moe()(tokens(2, 20), used).abs().sum(2) > 0).long(), used)


def test_stacked_experts_are_their_matrices() -> None:
    torch.manual_seed(0)
    for gated in (True, False):
        stacked = StackedExperts(WIDTH, 12, 3, gated=gated, std=0.5)
        x, sizes = tokens(11), [[2, 0, 4], [3, 2, 0]]
        y = stacked(x, sizes)
        at = 0
        for row in sizes:
            for number, n in enumerate(row):
                hidden = x[at : at + n] @ stacked.up[number].T
                hidden = F.silu(hidden[:, :12]) * hidden[:, 12:] if gated else F.silu(hidden)
                torch.testing.assert_close(y[at : at + n], hidden @ stacked.down[number].T)
                at += n
        stacked.down.requires_grad_(False)
        part = stacked.part(1, 3)
        assert torch.equal(part(x[2:6], [[0, 4]]), y[2:6])
        assert (part.up.requires_grad, part.down.requires_grad) == (True, False)
        assert part.part(1, 2).first == 2
        assert torch.equal(part.up, stacked.up[1:])
    with pytest.raises(ValueError, match="11 rows, and the experts' sizes are"):
        stacked(x, [[1, 2, 3]])


def test_weight_gradients_are_added_in_the_order_of_the_sources() -> None:
    """So that one expert for several ranks has the bits of an all-reduce of their gradients."""
    torch.manual_seed(0)
    for experts in (Experts([mlp(), mlp()]), StackedExperts(WIDTH, 40, 2, std=0.5)):
        x, out_grad, sizes = tokens(90), tokens(2, 45).flatten(0, 1), [[10, 20], [5, 0], [20, 12], [13, 10]]
        alone: list[list[Tensor]] = []
        for source, rows in enumerate(sizes):
            start = sum(map(sum, sizes[:source]))
            mine = slice(start, start + sum(rows))
            experts.zero_grad()
            experts(x[mine], [rows]).backward(out_grad[mine])
            alone.append([g.clone() for g in grads(experts)])
        experts.zero_grad()
        experts(x, sizes).backward(out_grad)
        for number, grad in enumerate(grads(experts)):
            total = alone[0][number].clone()
            for other in alone[1:]:
                total += other[number]
            assert torch.equal(grad, total)


def test_a_residual_and_a_shared_expert_are_what_every_token_passes_through() -> None:
    x, beside = tokens(9), mlp()
    plain = moe()(x)
    shared = moe(shared=beside)(x)
    torch.testing.assert_close(shared, plain + beside(x))
    scale = nn.Linear(WIDTH, 1)
    torch.testing.assert_close(moe(shared=beside, shared_gate=scale)(x), plain + beside(x) * scale(x).sigmoid())
    layer = moe(residual=beside, width=WIDTH)
    assert layer.coefficient is not None
    share = layer.coefficient(x).softmax(1)
    torch.testing.assert_close(layer(x), plain * share[:, :1] + beside(x) * share[:, 1:])
    with pytest.raises(ValueError, match="width"):
        moe(residual=beside)


def test_bf16_tokens_are_added_in_fp32() -> None:
    layer = moe(routing=Routing(k=4))
    exact = layer(tokens(32).bfloat16().float())
    y = layer.bfloat16()(tokens(32).bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=0.03, atol=0.02)


def test_a_gpts_mlps_become_mixtures_from_outside() -> None:
    torch.manual_seed(0)
    model = mixtures(GPT(SHAPE), [2, 4], Routing(k=2), residual=True, balance=0.1, z=0.01)
    assert [len(layer.experts) for layer in layers(model)] == [2, 4]  # type: ignore[arg-type]
    first, second = layers(model)[1].experts["0"], layers(model)[1].experts["1"]  # type: ignore[index]
    assert isinstance(first, MLP)
    assert not torch.equal(first.up.weight, second.up.weight)
    assert first.down.weight.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.2)
    ids = torch.randint(32, (2, 17))
    loss = model(ids[:, :-1], ids[:, 1:])
    plain = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    routing = sum(0.1 * r.balance + 0.01 * r.z for r in (layer.routes for layer in layers(model)) if r)
    torch.testing.assert_close(loss, plain + routing)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    torch.testing.assert_close(model.eval()(ids[:, :-1], ids[:, 1:]), plain)
    copy.deepcopy(model)


def test_upcycled_experts_are_the_mlp() -> None:
    torch.manual_seed(0)
    plain = GPT(SHAPE)
    ids = torch.randint(32, (2, 16))
    expected = plain(ids)
    model = mixtures(plain, 4, Routing(k=2), every=2, upcycle=True)
    assert [layer is model.blocks[1].mlp for layer in layers(model)] == [True]
    torch.testing.assert_close(model(ids), expected)
    with pytest.raises(ValueError, match="for 1 mixtures in 2 blocks"):
        mixtures(GPT(SHAPE), [2, 2], every=2)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=True)
        return y


def test_a_checkpoint_that_would_lose_the_routing_losses_is_refused() -> None:
    model = mixtures(GPT(SHAPE), 4, Routing(k=2))
    ids = torch.randint(32, (2, 16))
    layer = model.blocks[0].mlp
    model.blocks[0].mlp = Checkpointed(layer)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="without gradients"):
        model(ids, ids)
    for layer in layers(model):
        layer.gate.requires_grad_(False)  # then there is none to lose
    model(ids, ids).backward()


def test_anew_draws_other_weights_of_the_same_spread() -> None:
    module = nn.Linear(64, 64)
    other = anew(module)
    assert not torch.equal(module.weight, other.weight)
    assert other.weight.std().item() == pytest.approx(module.weight.std().item(), rel=0.1)


class Theirs(nn.Module):
    """Experts of one of transformers' blocks, as ours are called."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        hidden = theirs.down_proj.shape[2]
        self.ours = StackedExperts(WIDTH, hidden, len(theirs.down_proj))
        self.ours.up, self.ours.down = theirs.gate_up_proj, theirs.down_proj

    def forward(self, x: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
        return self.ours(x, sizes)  # type: ignore[no-any-return]


def block_of(name: str) -> tuple[nn.Module, MoE]:
    """One of transformers' blocks with drawn weights, and ours with the same tensors."""
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    if name == "mixtral":
        from transformers.models.mixtral.configuration_mixtral import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        theirs = MixtralSparseMoeBlock(MixtralConfig(**sizes, intermediate_size=24, num_local_experts=6))
        routing, more = Routing(k=2), {}
    elif name == "qwen2_moe":
        from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
        from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

        config = Qwen2MoeConfig(**sizes, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=6)
        theirs = Qwen2MoeSparseMoeBlock(config)
        routing = Routing(k=4, normalize=False)
        more = {"shared": theirs.shared_expert, "shared_gate": theirs.shared_expert_gate}
    elif name == "qwen3_moe":
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        config = Qwen3MoeConfig(
            **sizes, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True
        )
        theirs, routing, more = Qwen3MoeSparseMoeBlock(config), Routing(k=3), {}
    else:
        from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

        config = DeepseekV3Config(
            **sizes, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2
        )
        theirs = DeepseekV3MoE(config)
        routing = Routing(k=3, score="sigmoid", bias=True, groups=4, top_groups=2, scale=config.routed_scaling_factor)
        more = {"shared": theirs.shared_experts}
    for p in [*theirs.parameters(), *theirs.buffers()]:
        nn.init.normal_(p, std=0.3)
    gate = Gate(WIDTH, theirs.experts.num_experts, routing)
    gate.weight = theirs.gate.weight
    if gate.bias is not None:
        gate.bias = theirs.gate.e_score_correction_bias
    return theirs, MoE(gate, Theirs(theirs.experts), **more)


@pytest.mark.skipif(find_spec("transformers") is None, reason="no transformers: pip install 'zero-from-scratch[hf]'")
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_it_is_transformers_block_with_the_same_weights(name: str) -> None:
    """Values and gradients; both add k answers a token, in another order: 1e-5 of the largest is some roundings."""
    torch.manual_seed(0)
    theirs, ours = block_of(name)
    x, out_grad = tokens(3, 20).requires_grad_(), tokens(3, 20).flip(1)
    found: list[list[Tensor]] = []
    for block in (theirs, ours):
        theirs.zero_grad()
        y = block(x)
        (grad,) = torch.autograd.grad(y, x, out_grad, retain_graph=True)
        y.backward(out_grad)
        found.append([y.detach(), grad, *(g.clone() for g in grads(theirs))])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-5 * a.abs().max()


def test_routes_of_another_router_mix_as_our_own() -> None:
    layer, x = moe(), tokens(12)
    routes = layer.gate(x)
    again = Routes.given(routes.indices, routes.weights, 4)
    assert torch.equal(layer.mix(layer.experts, x, again), layer(x))  # type: ignore[arg-type]
