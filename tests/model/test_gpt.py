"""The model: shapes, tied weights, causality, initial weights, and low precision close to fp32."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from refimpl.model import gpt
from refimpl.model.gpt import GPT, GPTConfig, Linear, native_low_precision
from refimpl.plan.shape import of_gpt

TINY = GPTConfig(vocab=32, context=16, width=64, layers=2, heads=4)


def tokens(config: GPTConfig = TINY, batch: int = 3, seed: int = 0) -> Tensor:
    return torch.randint(config.vocab, (batch, config.context), generator=torch.Generator().manual_seed(seed))


def model(config: GPTConfig = TINY, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


def test_logits_and_loss_have_the_documented_shapes() -> None:
    net, x = model(), tokens()
    assert net(x).shape == (3, 16, 32)
    assert net(x[:, :5]).shape == (3, 5, 32)
    loss = net(x, x)
    assert loss.shape == ()
    assert loss.dtype == torch.float32


def test_a_new_model_knows_nothing() -> None:
    loss = model()(tokens(batch=16), tokens(batch=16, seed=1)).item()
    assert loss == pytest.approx(math.log(TINY.vocab), abs=0.1)


@pytest.mark.parametrize(
    "config",
    [TINY, replace(TINY, tied=False), GPTConfig(), GPTConfig(vocab=50, context=8, width=128, layers=3, heads=2)],
)
def test_parameter_count_and_multiples_of_64(config: GPTConfig) -> None:
    net = model(config)
    assert sum(p.numel() for p in net.parameters()) == config.parameters == of_gpt(config).parameters
    assert all(p.numel() % 64 == 0 for p in net.parameters())
    assert config.hidden_size == config.width


def test_the_head_is_the_token_embedding() -> None:
    net = model()
    assert net.head.weight is net.wte.weight
    net(tokens(), tokens(seed=1)).backward()
    both = net.wte.weight.grad
    assert both is not None
    # Rows of tokens that never occur still get a gradient: it can only come through the head.
    unused = sorted(set(range(TINY.vocab)) - set(tokens().flatten().tolist()))
    net.zero_grad()
    net(tokens() % 4, tokens(seed=1)).backward()
    assert net.wte.weight.grad is not None
    assert (net.wte.weight.grad[4:].abs().sum(1) > 0).all(), unused


def test_a_token_does_not_see_the_future() -> None:
    net, x = model(), tokens()
    y = x.clone()
    y[:, 9:] = (y[:, 9:] + 1) % TINY.vocab
    before, after = net(x), net(y)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9], after[:, 9])


def test_a_token_sees_the_past_and_its_position() -> None:
    net = model()
    x = tokens()
    y = x.clone()
    y[:, 0] = (y[:, 0] + 1) % TINY.vocab
    assert not torch.allclose(net(x)[:, -1], net(y)[:, -1], atol=1e-6)
    same = torch.zeros(1, TINY.context, dtype=torch.int64)
    assert not torch.allclose(net(same)[:, 3], net(same)[:, 4], atol=1e-6)


def test_initial_weights() -> None:
    net = model(GPTConfig())
    for name, p in net.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif "ln" in name:
            assert (p == 1).all(), name
        else:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * 4) if residual else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.05), name


def test_each_submodule_draws_its_weights_in_its_own_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What zero.Init relies on: nothing touches a weight after its module's constructor has returned."""
    made: dict[int, tuple[torch.nn.Parameter, Tensor]] = {}
    for cls in (gpt.Linear, gpt.Embedding, torch.nn.LayerNorm):
        constructor = cls.__init__

        def wrapped(self, *args, _constructor=constructor, **kwargs):  # type: ignore[no-untyped-def]
            _constructor(self, *args, **kwargs)
            made.update({id(p): (p, p.detach().clone()) for p in self.parameters()})

        monkeypatch.setattr(cls, "__init__", wrapped)
    net = model()
    for p in net.parameters():
        assert torch.equal(p, made[id(p)][1])


def test_bf16_is_close_to_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = model(), tokens(), tokens(seed=1)
    exact = net(x, y)
    exact.backward()
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    for native in (True, False):
        monkeypatch.setattr(gpt, "native_low_precision", lambda device, dtype, native=native: native)
        low = model().bfloat16()
        loss = low(x, y)
        loss.backward()
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
        for p, g in zip(low.parameters(), gradients, strict=True):
            assert p.grad is not None
            assert p.grad.dtype == torch.bfloat16
            assert (p.grad.float() - g).norm() < 0.05 * g.norm() + 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_emulated_product_rounds_once(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(gpt, "native_low_precision", lambda device, dtype: False)
    layer = Linear(64, 64).to(dtype)
    x = torch.randn(8, 64).to(dtype)
    assert layer(x).dtype == dtype
    assert torch.equal(layer(x), (x.float() @ layer.weight.float().T).to(dtype))


def test_float64_keeps_its_digits_where_nothing_narrow_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "native_low_precision", lambda device, dtype: False)
    layer = Linear(64, 64).double()
    x = torch.randn(8, 64, dtype=torch.float64)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_native_low_precision_answers_for_the_cpu() -> None:
    cpu = torch.device("cpu")
    assert native_low_precision(cpu) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert native_low_precision(cpu, torch.float16) == torch.ops.mkldnn._is_mkldnn_fp16_supported()


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="width 64 does not divide into 5 heads"):
        GPTConfig(width=64, heads=5)
    with pytest.raises(ValueError, match="layers is 0"):
        GPTConfig(layers=0)
    with pytest.raises(ValueError, match="17 tokens is longer than the model's context of 16"):
        model()(torch.zeros(1, 17, dtype=torch.int64))
