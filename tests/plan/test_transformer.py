"""The costs of a transformer beside what torch counts on the real model; parallel/test_swap.py counts traffic."""

import pytest
import torch
from kept import counted
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from refimpl.activation.budget import every
from refimpl.activation.chain import count
from refimpl.model.gpt import GPT, Block, GPTConfig
from refimpl.plan.transformer import activation_bytes, checkpointed_bytes, flops_per_token

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


@every_shape
def test_activations_are_those_that_autograd_keeps(config: GPTConfig) -> None:
    block, x = Block(config), torch.randn(2, config.context, config.width, requires_grad=True)
    with counted(block.parameters) as kept:
        y = block(x)
    assert y.requires_grad
    assert kept.now == activation_bytes(config, batch=2, itemsize=4)


@every_shape
def test_checkpointing_keeps_inputs_and_one_block(config: GPTConfig) -> None:
    model, x = GPT(config), torch.randn(2, config.context, config.width, requires_grad=True)
    y = x
    with counted(model.parameters) as kept:
        for block in model.blocks:
            y = checkpoint(block, y, use_reentrant=False)
    assert kept.now == config.layers * x.numel() * 4
    assert checkpointed_bytes(config, batch=2, itemsize=4) == count(every(1, config.layers), list(model.blocks), x)
