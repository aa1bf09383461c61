"""What the demo's processes do: one oracle that trains alone, and ranks that train the same model by a strategy.

Both see the same micro-batches, N of them a step. The oracle adds their gradients in rank order, divides by N and calls
torch's AdamW: nothing of this package is in its update. In fp32 every strategy must end with the same bits.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from refimpl import launch
from refimpl.comm.group import Group
from refimpl.measure.clock import Clock
from refimpl.measure.memory import MemoryMeter
from refimpl.model.data import Batches
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.plan import formulas
from refimpl.plan.formulas import Strategy
from refimpl.zero.config import ZeroConfig
from refimpl.zero.ddp import DDP
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero2 import Zero2
from refimpl.zero.zero3 import Zero3

STAGES: dict[Strategy, type[DDP | Zero1 | Zero2 | Zero3]] = {"ddp": DDP, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARMUP = 3  # steps that the median leaves out


@dataclass(frozen=True)
class Task:
    """What to learn, and how: the same for every strategy."""

    model: GPTConfig
    text: bytes
    steps: int
    seed: int = 0
    batch: int = 4  # sequences in a micro-batch
    lr: float = 5e-4
    fused: bool = True  # torch's AdamW in one kernel


@dataclass(frozen=True)
class Compared:
    """Bytes by name, as counted and as the formula has them."""

    counted: dict[str, int] = field(default_factory=dict)
    formula: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """What one process brings home. Bytes are its own: memory between backward and step, traffic of the last step."""

    losses: list[float]  # of each step
    weights: dict[str, Tensor] | None  # on the first rank
    step_ms: float = math.nan  # median
    memory: Compared = Compared()  # by class
    sent: Compared = Compared()  # by collective
    transit: int = 0  # in buffers that parameters and gradients travel in, which are in no formula


def repeatable(task: Task) -> tuple[GPT, Batches]:
    """The model with the task's initial weights, and its data. From here on this process repeats itself bit for bit."""
    torch.set_num_threads(1)
    if Group.world().device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(task.seed)
    return GPT(task.model), Batches(task.text, task.model.context, task.batch, task.seed)


def oracle(task: Task, micro_batches: int) -> list[Trained]:
    """Train on one process in fp32: `micro_batches` a step, their gradients summed in order, then divided."""
    device = Group.world().device
    model, batches = repeatable(task)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, fused=task.fused)
    losses = []
    for step in range(task.steps):
        parts = []
        for micro in range(micro_batches):
            loss = model(*batches.batch(step, micro, device))
            loss.backward()
            parts.append(loss.item())
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(micro_batches)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(parts) / micro_batches)
        launch.report("oracle")
    return [Trained(losses, weights={name: w.cpu() for name, w in model.state_dict().items()})]


def train(task: Task, strategies: Sequence[Strategy], dtype: str) -> list[Trained]:
    """Train as one rank of N by each strategy. They take turns step by step, so that their times can be compared."""
    learners = [Learner(task, strategy, dtype) for strategy in strategies]
    for step in range(task.steps):
        for learner in learners:
            learner.learn(step)
    return [learner.trained() for learner in learners]


class Learner:
    """One rank of one strategy: takes micro-batch `rank` of every step; the strategy averages the gradients."""

    def __init__(self, task: Task, strategy: Strategy, dtype: str) -> None:
        self.task, self.strategy, self.dtype = task, strategy, DTYPES[dtype]
        self.label = f"{strategy} {dtype}"
        self.group = Group.world(deterministic=True)
        self.model, self.batches = repeatable(task)
        self.model.to(self.group.device, self.dtype)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=task.lr, fused=task.fused)
        config = ZeroConfig(leaf_modules=("Block",))
        self.stage = STAGES[strategy](self.model, optimizer, self.group, config=config)
        self.clock = Clock(self.group.device, warmup=min(WARMUP, task.steps - 1))
        self.losses: list[float] = []
        self.memory: dict[str, int] = {}

    def learn(self, step: int) -> None:
        """One optimizer step. The ledger keeps the last one's traffic."""
        self.group.ledger.reset()
        tokens, targets = self.batches.batch(step, self.group.rank, self.group.device)
        with self.clock.time("step"):
            loss = self.model(tokens, targets)
            self.stage.backward(loss)
            self.stage.gradients.finish()  # what still travels arrives, and counts as gradients
            if step == self.task.steps - 1:
                self.memory = MemoryMeter(self.stage.tensors).now()
            self.stage.step()
        self.losses.append(loss.item())
        if self.group.rank == 0:
            launch.report(self.label)

    def trained(self) -> Trained:
        """What this rank brings home. A collective."""
        sent = self.group.ledger.sent_bytes()  # before the weights are gathered
        layout, ranks = formulas.layout_of(self.stage), self.group.size
        memory = formulas.memory_bytes(self.strategy, ranks, self.dtype.itemsize, layout)
        traffic = formulas.traffic(self.strategy, ranks, self.dtype.itemsize, layout)
        return Trained(
            losses=self.losses,
            step_ms=self.clock.median("step"),
            weights=self.stage.full_state_dict(),
            memory=Compared({name: self.memory[name] for name in memory}, memory),
            sent=Compared(sent, formulas.by_collective(traffic)),
            transit=self.memory["buckets"] + self.memory["gathered"],
        )
