"""Checkpointing inside every stage: the oracle's bits, no gather more than the plain run's, and less that is saved."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import STAGES, Job, Net, differing, oracle, tokens, train
from worlds import run

from refimpl.activation.checkpoint import Checkpoint
from refimpl.activation.home import Host
from refimpl.activation.policy import matmuls
from refimpl.comm.group import Group
from refimpl.measure.memory import MemoryMeter
from refimpl.zero.config import ZeroConfig
from refimpl.zero.zero3 import Zero3

HOWS = {"plain": None, "checkpoint": Checkpoint(), "matmuls": Checkpoint(policy=matmuls()), "host": Checkpoint(Host())}
SHARDED = {"reduce_bucket_size": 700, "param_persistence_threshold": 0}


class Checkpointed(Net):
    """The first two blocks are checkpointed, each and together; the third with the frozen layer; the tied head not."""

    def __init__(self, how: str, dropout: float) -> None:
        super().__init__()
        self.how, self.dropout = how, dropout

    def forward(self, tokens: Tensor) -> Tensor:
        call: Any = HOWS[self.how] or (lambda fn, *args: fn(*args))

        def one(block: nn.Module, x: Tensor) -> Tensor:
            return nn.functional.dropout(block(x), self.dropout)

        def first_two(x: Tensor) -> Tensor:
            for block in self.blocks[:2]:
                x = call(one, block, x)
            return x.sin()

        x = call(first_two, self.embed(tokens))
        x = call(lambda y: self.frozen(one(self.blocks[2], y)), x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(-1, 1).flatten())


def make(how: str, dropout: float = 0.0) -> Net:
    return Checkpointed(how, dropout)


def job(how: str, config: dict[str, Any], dropout: float = 0.0) -> Job:
    return Job(steps=3, micro_batches=2, clip=1.0, make=lambda: make(how, dropout), config=config)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_bits_of_one_plain_process(stage: str, ranks: int) -> None:
    config = SHARDED if stage == "zero3" else {"reduce_bucket_size": 700}
    outcome = run(train, stage, job("checkpoint", config), ranks=ranks)[0]
    expected = oracle(ranks, job("plain", {}), ranks_first=stage in ("zero2", "zero3"))
    assert differing(outcome.weights, expected) == []


@pytest.mark.parametrize("how", [name for name in HOWS if name != "plain"])
def test_dropout_is_the_plain_runs(how: str) -> None:
    outcome, plain, other = (
        run(train, "zero3", job(name, SHARDED, p), ranks=3)[0] for name, p in ((how, 0.3), ("plain", 0.3), (how, 0.2))
    )
    assert plain.weights is not None
    assert differing(outcome.weights, plain.weights) == []
    assert differing(other.weights, plain.weights) != []


def gathers(how: str, prefetch: int) -> tuple[int, int]:
    """All-gathers of parameters in the third step, and bytes."""
    torch.manual_seed(0)
    group = Group.world()
    model = make(how)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    stage = Zero3(model, optimizer, group, ZeroConfig(**SHARDED, prefetch_bucket_size=prefetch))
    for step in range(3):
        group.ledger.reset()
        stage.backward(model(tokens(step, group.rank)))
        stage.step()
    return group.ledger.calls("tag")["parameters"], group.ledger.sent_bytes("tag")["parameters"]


@pytest.mark.parametrize("prefetch", [0, 10_000])
@pytest.mark.parametrize("how", [name for name in HOWS if name != "plain"])
def test_zero3_gathers_no_more_than_without(how: str, prefetch: int) -> None:
    """A unit that backward has gathered is there for the second run, and a unit that the run gathers for backward."""
    assert run(gathers, how, prefetch, ranks=2) == run(gathers, "plain", prefetch, ranks=2)


def kept(how: str) -> int:
    """Activations between forward and backward."""
    torch.manual_seed(0)
    model = make(how)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    stage = Zero3(model, optimizer, Group.world(), ZeroConfig(**SHARDED))
    meter = MemoryMeter(stage.tensors)
    with meter:
        loss = model(tokens(0, 0))
        activations = meter.now()["activations"]
    loss.backward()
    return activations


def test_zero3_does_not_keep_what_the_checkpoint_drops() -> None:
    """Its own hooks, which look for parameters among what autograd saves, hand the rest on to the checkpoint's."""
    plain, checkpointed, selective = (run(kept, how, ranks=2)[0] for how in ("plain", "checkpoint", "matmuls"))
    inside = 13 + 3 * 13 + 3 * 13  # a block's Linear layers and GELU save this many elements a token, as fp32
    assert plain - checkpointed >= 3 * inside * tokens(0, 0).numel() * 4
    assert checkpointed < selective < plain
