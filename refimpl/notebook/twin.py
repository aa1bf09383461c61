"""What the chapters measure: a GPT trained by a stage on the ranks, and its twin, one process of plain torch.

measured = twin.measure("zero1", config, ranks=4)   # bytes kept, bytes sent, weights
twin.equal(measured.weights, twin.one_process(config, ranks=4))
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from refimpl import launch
from refimpl.comm.group import Group
from refimpl.measure.ledger import Event
from refimpl.measure.memory import MemoryMeter
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.plan.formulas import Layout, layout_of
from refimpl.zero.config import ZeroConfig
from refimpl.zero.ddp import DDP
from refimpl.zero.stage import Stage
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero2 import Zero2
from refimpl.zero.zero3 import Zero3

STAGES: dict[str, type[Stage]] = {"ddp": DDP, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3}


@dataclass(frozen=True)
class Measured:
    """Rank 0 after training. `kept`: bytes by class between backward and step; the rest is of the last step."""

    kept: dict[str, int]
    sent: dict[str, int]  # bytes by collective
    sent_for: dict[str, int]  # bytes by purpose: "gradients", "parameters", "norm"
    calls_for: dict[str, int]
    events: tuple[Event, ...]
    layout: Layout
    weights: dict[str, Tensor]  # whole


def data() -> Batches:
    """The micro-batches of every chapter: number a * N + r is rank r's of N, a-th of a step."""
    return Batches(corpus(), context=32, size=2)


def start(name: str, config: GPTConfig, dtype: torch.dtype = torch.float32, **options: Any) -> Stage:
    """A GPT and AdamW under a stage. Every rank's own weights are others; training begins with rank 0's."""
    group = Group.world()
    torch.manual_seed(group.rank)
    model = GPT(config).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return STAGES[name](model, optimizer, group, ZeroConfig(**options))


def measure(name: str, config: GPTConfig, ranks: int, **how: Any) -> Measured:
    """Train on new ranks; `how` as of `train`."""
    measured = launch.run(partial(train, name, config, **how), ranks=ranks)[0]
    assert measured
    return measured


def train(
    name: str,
    config: GPTConfig,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    steps: int = 2,
    autocast: bool = False,
    **options: Any,
) -> Measured | None:
    """On every rank: some steps; what rank 0 found. `options` are those of ZeroConfig."""
    stage, batches = start(name, config, dtype, **options), data()
    group = stage.group
    for step in range(steps):
        group.ledger.reset()
        for a in range(micro_batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = stage.model(*batches.batch(step, a * group.size + group.rank))
            stage.backward(loss / micro_batches, sync=a == micro_batches - 1)
        kept = MemoryMeter(stage.tensors).now()
        stage.step()
    ledger = group.ledger
    sent, sent_for, calls_for = ledger.sent_bytes(), ledger.sent_bytes("tag"), ledger.calls("tag")
    events, weights = tuple(ledger.events), stage.full_state_dict()
    if weights is None:
        return None
    return Measured(kept, sent, sent_for, calls_for, events, layout_of(stage), weights)


def one_process(
    config: GPTConfig, ranks: int, micro_batches: int = 1, ranks_first: bool = False, steps: int = 2
) -> dict[str, Tensor]:
    """Weights after `steps` of AdamW. `ranks_first`: each micro-batch is summed over ranks, and then the sums are.

    It runs in a process of its own, set up as a rank is: with one thread.
    """
    return launch.run(_one_process, config, ranks, micro_batches, ranks_first, steps, ranks=1)[0]


def _one_process(config: GPTConfig, ranks: int, micro_batches: int, ranks_first: bool, steps: int) -> dict[str, Tensor]:
    batches = data()
    torch.manual_seed(0)
    model = GPT(config)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = [[a * ranks + r for a in range(micro_batches)] for r in range(ranks)]
    if ranks_first:
        order = [list(column) for column in zip(*order, strict=True)]
    for step in range(steps):
        sums = []
        for inner in order:
            for micro in inner:
                (model(*batches.batch(step, micro)) / micro_batches).backward()
            sums.append([p.grad / ranks if ranks_first else p.grad for p in model.parameters()])  # type: ignore[operator]
            adamw.zero_grad()
        for p, *grads in zip(model.parameters(), *sums, strict=True):
            total = sum(grads[1:], start=grads[0])
            p.grad = total if ranks_first else total / ranks
        adamw.step()
        adamw.zero_grad()
    return dict(model.state_dict())


def equal(found: dict[str, Tensor], truth: dict[str, Tensor]) -> bool:
    """Whether two sets of weights are the same bits."""
    return found.keys() == truth.keys() and all(torch.equal(found[name], truth[name]) for name in truth)
