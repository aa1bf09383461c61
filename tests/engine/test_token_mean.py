"""Data-parallel ranks, and micro-batches, with unequally many tokens: each token counts alike, as in one process."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from worlds import run

import refimpl
from refimpl.engine.initialize import initialize
from refimpl.model.gpt import GPT, GPTConfig

SHAPE = GPTConfig(vocab=19, context=8, width=64, layers=1, heads=1)
MICRO, STEPS = 3, 2  # micro-batches of a rank in a step
Weights = dict[str, Tensor]


def batch(rank: int, step: int, micro: int) -> tuple[Tensor, Tensor]:
    """[1, T] int64 twice; from no token that counts to all but one."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    ids = torch.randint(SHAPE.vocab, (1, SHAPE.context + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[:, : (0, 8, 1, 5, 7)[(rank + 2 * micro) % 5]] = -100
    return ids[:, :-1], targets


def total_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def trained(stage: int, by_token: bool) -> tuple[list[float], Weights | None]:
    """Losses, the mean over ranks and micro-batches; weights, on rank 0."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICRO, "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_optimization": {"stage": stage},
    }  # fmt: skip
    engine, *_ = initialize(model=GPT(SHAPE), config=config)
    losses = []
    for step in range(STEPS):
        feeds = [batch(engine.group.rank, step, micro) for micro in range(MICRO)]
        each = [(y != -100).sum() for _, y in feeds]
        mean, found = torch.stack(each).sum() / MICRO, torch.zeros(1)
        for (x, y), tokens in zip(feeds, each, strict=True):
            total = total_of(engine(x), y)
            loss = refimpl.token_mean(total, mean, engine.group) if by_token else total / tokens.clamp(min=1)
            engine.backward(loss)
            engine.step()
            found += loss.detach() / MICRO
        engine.group.all_reduce(found, "mean")
        losses.append(found.item())
    return losses, engine.stage.full_state_dict()


def alone(ranks: int, micro_batches: int = MICRO) -> tuple[list[float], Weights]:
    """One process that has all tokens of a step at once."""
    torch.manual_seed(0)
    model, losses = GPT(SHAPE), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        x, y = (
            torch.cat(part)
            for part in zip(
                *(batch(r, step, micro) for r in range(ranks) for micro in range(micro_batches)), strict=True
            )
        )
        loss = total_of(model(x), y) / (y != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(("ranks", "stage"), [(2, 1), (3, 2), (4, 3)])
def test_each_token_counts_alike(ranks: int, stage: int) -> None:
    expected, weights = alone(ranks)
    by_token = run(trained, stage, True, ranks=ranks)
    assert all(losses == pytest.approx(expected, rel=1e-5) for losses, _ in by_token)
    found = by_token[0][1]
    assert found is not None
    for name, p in weights.items():  # sums of as many terms, in another order
        torch.testing.assert_close(found[name], p, rtol=1e-4, atol=1e-6)
    assert run(trained, stage, False, ranks=ranks)[0][0] != pytest.approx(expected, rel=1e-2), "each rank's own mean"


def trained_in_context() -> tuple[list[float], Weights | None]:
    """As `trained`, two ranks a sequence, one micro-batch a step: the engine takes the mean by itself."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.5, "sequence_parallel_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_optimization": {"stage": 1},
    }  # fmt: skip
    engine, *_ = initialize(model=GPT(SHAPE), config=config)
    losses = []
    for step in range(STEPS):
        loss = engine(*batch(engine.axes.feed, step, 0))
        engine.backward(loss)
        engine.step()
        found = loss.detach().reshape(1).clone()
        engine.group.all_reduce(found, "mean")
        losses.append(found.item())
    return losses, engine.stage.full_state_dict()


def test_ranks_that_share_sequences_count_tokens_of_all_replicas() -> None:
    expected, weights = alone(ranks=2, micro_batches=1)
    found = run(trained_in_context, ranks=4)
    assert all(losses == pytest.approx(expected, rel=1e-5) for losses, _ in found)
    assert found[0][1] is not None
    for name, p in weights.items():
        torch.testing.assert_close(found[0][1][name], p, rtol=1e-4, atol=1e-6)


def nothing_counts() -> float:
    return refimpl.token_mean(torch.zeros(()), 0, refimpl.Group.world()).item()


def fewer_than_micro_batches() -> float:
    """One token in four micro-batches, on rank 1: a quarter of a token each."""
    group = refimpl.Group.world()
    return sum(refimpl.token_mean(torch.tensor(2.0 * (group.rank == 1 and k == 0)), 0.25 * group.rank, group).item()
               for k in range(4)) / 4  # fmt: skip


def test_few_tokens_and_none() -> None:
    assert run(nothing_counts, ranks=2) == [0.0, 0.0]
    assert run(fewer_than_micro_batches, ranks=2) == [0.0, 4.0], "their mean is the token's loss, 2"
