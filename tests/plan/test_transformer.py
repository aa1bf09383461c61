"""The costs of a transformer against what torch counts on the real model, and traffic against the ledger."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from worlds import run

from refimpl.activation.budget import every
from refimpl.activation.chain import count
from refimpl.comm.group import Group
from refimpl.model.gpt import GPT, Block, GPTConfig
from refimpl.plan.transformer import activation_bytes, checkpointed_bytes, flops_per_token, tensor_parallel_sent

SHAPES = [
    GPTConfig(vocab=96, context=32, width=64, layers=2, heads=4),
    GPTConfig(vocab=64, context=48, width=128, layers=3, heads=2),
]
every_shape = pytest.mark.parametrize("config", SHAPES, ids=str)


@every_shape
def test_operations_are_those_that_torch_counts(config: GPTConfig) -> None:
    tokens = torch.zeros(3, config.context, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        GPT(config)(tokens, tokens).backward()
    assert counter.get_total_flops() == flops_per_token(config) * tokens.numel()


def kept_by(model: torch.nn.Module, x: Tensor, forward: Any) -> int:
    """Bytes of the storages that autograd saves, the parameters left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in weights:
            saved[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = forward(x)
    assert result.requires_grad
    return sum(t.untyped_storage().nbytes() for t in saved.values())


@every_shape
def test_activations_are_those_that_autograd_keeps(config: GPTConfig) -> None:
    block, x = Block(config), torch.randn(2, config.context, config.width, requires_grad=True)
    assert kept_by(block, x, block) == activation_bytes(config, batch=2, itemsize=4)


@every_shape
def test_checkpointing_keeps_inputs_and_one_block(config: GPTConfig) -> None:
    model, x = GPT(config), torch.randn(2, config.context, config.width, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    assert kept_by(model, x, forward) == config.layers * x.numel() * 4
    assert checkpointed_bytes(config, batch=2, itemsize=4) == count(every(1, config.layers), list(model.blocks), x)


class Copy(torch.autograd.Function):
    """Megatron's f: nothing in forward, an all-reduce in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        ctx.group.all_reduce(grad)
        return grad, None


class Reduce(torch.autograd.Function):
    """Megatron's g: an all-reduce in forward, nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        x = x.contiguous()
        group.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def split_block(config: GPTConfig) -> tuple[int, Tensor, Tensor]:
    """A block split over the ranks by heads and by hidden units: bytes sent, its output and the whole block's."""
    torch.manual_seed(0)
    group, block = Group.world(), Block(config)
    x = torch.randn(2, config.context, config.width, requires_grad=True)
    whole = block(x)
    n, r, d = group.size, group.rank, config.width // config.heads

    def rows(t: Tensor, parts: int = 1) -> Tensor:
        return torch.cat([part.chunk(n)[r] for part in t.chunk(parts)])

    attention, mlp = block.attention, block.mlp
    group.ledger.reset()
    inner = Copy.apply(block.ln1(x), group)
    qkv = inner @ rows(attention.qkv.weight, 3).T + rows(attention.qkv.bias, 3)
    q, k, v = (t.view(2, config.context, -1, d).transpose(1, 2) for t in qkv.chunk(3, -1))
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    y = x + Reduce.apply(mixed @ attention.out.weight.chunk(n, 1)[r].T, group) + attention.out.bias
    inner = Copy.apply(block.ln2(y), group)
    up = torch.nn.functional.gelu(inner @ rows(mlp.up.weight).T + rows(mlp.up.bias), approximate="tanh")
    y = y + Reduce.apply(up @ mlp.down.weight.chunk(n, 1)[r].T, group) + mlp.down.bias
    y.sum().backward()
    return sum(group.ledger.sent_bytes().values()), y.detach(), whole.detach()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_split_block_sends_four_all_reduces(ranks: int) -> None:
    config = SHAPES[0]
    for sent, split, whole in run(split_block, config, ranks=ranks):
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-5)
        assert sent == tensor_parallel_sent(config, 2, ranks, itemsize=4)
