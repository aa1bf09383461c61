"""transformers' models trained through `deepspeed.initialize` on two ranks, beside transformers and torch alone."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import run

import refimpl.deepspeed as deepspeed
from refimpl.model.patterns.named import pattern_named

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers (hf)")
STEPS, BATCH, LENGTH, LR = 4, 4, 32, 0.05
SPARSE = {"mode": "fixed", "block": 8, "num_local_blocks": 2, "num_global_blocks": 1, "attention": "bidirectional"}


def made(kind: str) -> Any:
    from transformers import BertConfig, BertForMaskedLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    if kind == "bert":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        wide = {"vocab_size": 64, "max_position_embeddings": LENGTH, "initializer_range": 0.3}  # attention matters then
        return BertForMaskedLM(BertConfig(**sizes, **quiet, **wide))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MixtralForCausalLM(MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=4, **sizes))


def tokens(step: int) -> Tensor:
    return torch.randint(3, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def by_deepspeed(kind: str, config: dict[str, Any]) -> list[float]:
    """This rank's losses."""
    common = {"train_batch_size": BATCH, "optimizer": {"type": "SGD", "params": {"lr": LR}}, "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(model=made(kind), config=common | config)
    losses = []
    for step in range(STEPS):
        mine = tokens(step).chunk(engine.dp_world_size)[engine.global_rank]
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def by_torch(kind: str, **more: Any) -> list[float]:
    """One process, all of the batch."""
    model: nn.Module = made(kind).train()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for step in range(STEPS):
        loss = model(input_ids=tokens(step), labels=tokens(step), **more).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [1, 3])
def test_a_mixture_of_experts(stage: int) -> None:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"expert_parallel": {"enabled": True, "autoep_size": 2}, "zero_optimization": zero}
    found = torch.tensor(run(by_deepspeed, "mixtral", config, ranks=2)).mean(0)
    torch.testing.assert_close(found, torch.tensor(by_torch("mixtral")), rtol=1e-5, atol=0)
    assert found[0] != found[-1]


@pytest.mark.parametrize("stage", [0, 2])
def test_sparse_attention(stage: int) -> None:
    """BERT, whose own attention has the blocks as a mask in the other process; and without it, other losses."""
    layout = pattern_named(SPARSE["mode"], 4, SPARSE).make_layout(LENGTH).bool()
    mask = layout.repeat_interleave(8, 1).repeat_interleave(8, 2).expand(BATCH, -1, -1, -1)
    config = {"sparse_attention": SPARSE, "zero_optimization": {"stage": stage}}
    found = torch.tensor(run(by_deepspeed, "bert", config, ranks=2)).mean(0)
    torch.testing.assert_close(found, torch.tensor(by_torch("bert", attention_mask=mask)), rtol=1e-5, atol=0)
    assert abs(found[-1] - by_torch("bert")[-1]) > 1e-3 * found[-1]
