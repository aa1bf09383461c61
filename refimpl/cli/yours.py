"""`refimpl demo --yours`: the demo's GPT, trained by the four classes that the learner wrote in chapters 02 to 06.

One process of plain torch is the oracle here too. Memory is all that is alive between backward and step and was not
before, so a copy that an answer keeps shows. A class takes part once its grader has passed it.

What `Ddp` and `GradientShards` leave open is done here: an optimizer for the first; for the second the update of the
shards and the gather of the new weights. The head is not tied to the embedding, since chapter 06's units share nothing.
AdamW is not fused: its bits would depend on where in a tensor a shard begins.
"""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage, nn

from refimpl import launch
from refimpl.cli.options import Plan
from refimpl.cli.train import WARMUP, Compared, Task, Trained, repeatable
from refimpl.comm.collectives import sent_in_all_reduce
from refimpl.comm.group import Group
from refimpl.grading.chapters import find_chapter, import_file
from refimpl.grading.ladder import LADDER
from refimpl.grading.progress import Progress
from refimpl.measure.clock import Clock
from refimpl.measure.memory import MemoryMeter
from refimpl.plan.formulas import Strategy
from refimpl.zero.flat import round_up

LIMIT = 2**19  # elements of a bucket

Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


def asked(plan: Plan) -> Plan:
    """The same demo by the answers that stand. ValueError if none does."""
    progress, files, missing = Progress.load(), dict[Strategy, Path](), []
    for strategy, (chapter, name) in LADDER.items():
        found = find_chapter(chapter)
        if strategy in plan.strategies and progress.stands(found, name):
            files[strategy] = found.exercise
        elif strategy in plan.strategies:
            missing.append(
                f"{strategy}: your {name} has not passed yet; grade it by .venv/bin/pytest exercises/{chapter}"
            )
    if not files:
        raise ValueError(f"--yours: none of your classes can train yet. {missing[0]}")
    task = replace(plan.task, model=replace(plan.task.model, tied=False), fused=False)
    return replace(plan, task=task, strategies=files, device="cpu", train=train, dtypes=("fp32",), notes=missing)


class Built:
    """One answer around a model. `sizes`: elements that travel together, before padding."""

    sizes: list[int]
    optimizer: torch.optim.Optimizer

    def finish(self) -> None:
        """After backward: what still travels arrives."""

    def step(self) -> None:
        """New weights, and no gradients."""
        raise NotImplementedError

    def gather(self) -> None:
        """Make the model whole, at the end."""


class OfDdp(Built):
    """`Ddp` averages gradients; every rank updates all parameters."""

    def __init__(self, answers: Any, model: nn.Module, group: Group, make: Make) -> None:
        self.ddp = answers.Ddp(model, group, LIMIT)
        self.optimizer = make(list(model.parameters()))
        self.sizes = [numel(bucket) for bucket in buckets(model)]

    def finish(self) -> None:
        self.ddp.finish()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class OfZero1(Built):
    """`ShardedOptimizer` does all of it, in one buffer."""

    def __init__(self, answers: Any, model: nn.Module, group: Group, make: Make) -> None:
        self.sharded = answers.ShardedOptimizer(model, group, make)
        self.optimizer = self.sharded.optimizer
        self.sizes = [numel(model.parameters())]

    def step(self) -> None:
        self.sharded.step()


class OfZero2(Built):
    """`GradientShards` leaves a rank its shards' mean gradients; the parameters lie in buffers that are cut alike."""

    def __init__(self, answers: Any, model: nn.Module, group: Group, make: Make) -> None:
        self.group = group
        cut = buckets(model)
        self.sizes = [numel(bucket) for bucket in cut]
        self.flats = [flattened(bucket, group.size) for bucket in cut]  # [P] each
        self.mine = [nn.Parameter(flat.view(group.size, -1)[group.rank]) for flat in self.flats]  # [S] each
        self.gradients = answers.GradientShards(model, group, LIMIT)
        self.optimizer = make(self.mine)

    def finish(self) -> None:
        self.gradients.finish()

    @torch.no_grad()
    def step(self) -> None:
        for number, shard in enumerate(self.mine):
            shard.grad = self.gradients.shards[number]
        self.gradients.shards.clear()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for flat, shard in zip(self.flats, self.mine, strict=True):
            self.group.all_gather(flat, shard)


class OfZero3(Built):
    """`Zero3` keeps a shard of each module, and leaves its mean gradient."""

    def __init__(self, answers: Any, model: nn.Module, group: Group, make: Make) -> None:
        own = [list(m.parameters(recurse=False)) for m in model.modules()]
        self.sizes = [numel(params) for params in own if params]
        self.zero = answers.Zero3(model, group)
        self.mine = {module: nn.Parameter(unit.mine) for module, unit in self.zero.units.items()}  # [S] each
        self.optimizer = make(list(self.mine.values()))

    def step(self) -> None:
        for module, shard in self.mine.items():
            shard.grad = self.zero.grads.pop(module)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gather(self) -> None:
        for unit in self.zero.units.values():
            unit.gather()


BUILT: dict[Strategy, type[OfDdp | OfZero1 | OfZero2 | OfZero3]] = {
    "ddp": OfDdp,
    "zero1": OfZero1,
    "zero2": OfZero2,
    "zero3": OfZero3,
}


def numel(params: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in params)


def buckets(model: nn.Module) -> list[list[nn.Parameter]]:
    """As chapters 02 and 05 ask for them."""
    given = import_file(find_chapter("05_zero2").solution, "given")
    cut: list[list[nn.Parameter]] = given.assign_buckets(list(model.parameters()), LIMIT)
    return cut


@torch.no_grad()
def flattened(params: Sequence[nn.Parameter], ranks: int) -> Tensor:
    """The parameters end to end in one buffer [P], of which they become views."""
    sizes = [p.numel() for p in params]
    flat = torch.zeros(round_up(sum(sizes), ranks))
    for p, piece in zip(params, torch.split(flat[: sum(sizes)], sizes), strict=True):
        p.data = piece.view(p.shape).copy_(p)
    return flat


def formula(strategy: Strategy, sizes: Sequence[int], tensors: int, ranks: int) -> tuple[dict[str, int], ...]:
    """Bytes of rank 0 in fp32: kept between backward and step, by class; sent in a step, by collective.

    `sizes`: elements that travel together. `tensors`: what AdamW updates; of each it counts the steps in 4 bytes.
    """
    whole, padded = sum(sizes), sum(round_up(size, ranks) for size in sizes)
    shard = padded // ranks
    once = 4 * (padded - shard)
    weights, gradients, owned = {
        "ddp": (whole, whole, whole),
        "zero1": (padded, whole, shard),
        "zero2": (padded, shard, shard),
        "zero3": (shard, shard, shard),
    }[strategy]
    sent = {"reduce_scatter": once, "all_gather": once * (2 if strategy == "zero3" else 1)}
    if strategy == "ddp":
        sent = {"all_reduce": 4 * sum(sent_in_all_reduce(size, 0, ranks) for size in sizes)}
    return {"parameters": 4 * weights, "gradients": 4 * gradients, "optimizer": 8 * owned + 4 * tensors}, sent


def train(task: Task, files: Mapping[Strategy, Path], dtype: str) -> list[Trained]:
    """Train as one rank of N by each answer, one after the other: what one keeps is not to count as another's."""
    return [trained(task, strategy, import_file(path, path.stem)) for strategy, path in files.items()]


def trained(task: Task, strategy: Strategy, answers: Any) -> Trained:
    """What this rank brings home from one answer."""
    group = Group.world(deterministic=True)
    model, batches = repeatable(task)
    before = WeakSet(alive())
    built = BUILT[strategy](answers, model, group, partial(torch.optim.AdamW, lr=task.lr, fused=task.fused))
    meter = MemoryMeter(lambda: classes(model, built.optimizer, group, before))
    clock, losses, memory = Clock(warmup=min(WARMUP, task.steps - 1)), [], dict[str, int]()
    for step in range(task.steps):
        group.ledger.reset()
        with clock.time("step"):
            losses.append(backward(model, *batches.batch(step, group.rank)))
            built.finish()
            if step == task.steps - 1:
                memory = meter.now()
            built.step()
        if group.rank == 0:
            launch.report(f"your {strategy}")
    sent = group.ledger.sent_bytes()
    built.gather()
    weights = {name: w.clone() for name, w in model.state_dict().items()} if group.rank == 0 else None
    tensors = sum(len(part["params"]) for part in built.optimizer.param_groups)
    expected = formula(strategy, built.sizes, tensors, group.size)
    counted = {name: memory[name] for name in expected[0]}
    return Trained(
        losses,
        weights,
        clock.median("step"),
        Compared(counted, expected[0]),
        Compared(sent, expected[1]),
        transit=memory["buckets"],
    )


def backward(model: nn.Module, tokens: Tensor, targets: Tensor) -> float:
    """The loss. It, its graph and the batch are gone behind this."""
    loss: Tensor = model(tokens, targets)
    torch.autograd.backward(loss)
    return loss.item()


def classes(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, before: WeakSet[UntypedStorage]
) -> dict[str, list[Tensor]]:
    """What is alive and was not before. A gradient is whatever is nobody else's."""
    states = optimizer.state.values()
    updated = [p for part in optimizer.param_groups for p in part["params"]]
    return {
        "parameters": [*model.parameters(), *updated],
        "optimizer": [t for state in states for t in state.values() if isinstance(t, Tensor)],
        "buckets": group.scratch(),
        "gradients": [t for storage, t in alive().items() if storage not in before],
    }


def alive() -> dict[UntypedStorage, Tensor]:
    """A tensor of each storage that Python can reach, those of gradients too."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]  # isinstance asks objects, and some warn
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return {t.untyped_storage(): t for t in tensors}
