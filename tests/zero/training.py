"""What the tests of the stages train: a small GPT-like net with every awkward kind of parameter, and its oracle."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.measure.ledger import Event
from refimpl.measure.memory import MemoryMeter
from refimpl.optim.lamb import Lamb
from refimpl.optim.loss_scale import LossScaler
from refimpl.optim.muon import Muon
from refimpl.plan.formulas import Layout, layout_of
from refimpl.zero.config import ZeroConfig
from refimpl.zero.ddp import DDP
from refimpl.zero.stage import Stage
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero2 import Zero2
from refimpl.zero.zero3 import Zero3

STAGES: dict[str, type[Stage]] = {"ddp": DDP, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied embedding, a frozen layer, an unused layer, odd sizes (width 13 fits no multiple of 64)."""

    def __init__(self, width: int = 13, layers: int = 3, vocab: int = 29) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(width, 5)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(self.frozen(x)))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(-1, 1).flatten())


def tokens(step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randint(29, (2, 7), generator=generator)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two parameter groups, as people write them: no weight decay for vectors."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)


def lamb(model: nn.Module) -> Lamb:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "max_coeff": 0.5}]
    return Lamb(groups, lr=1e-2, eps=1e-6)


def muon(model: nn.Module) -> Muon:
    hidden = [p for name, p in model.named_parameters() if p.ndim > 1 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed" in name]
    return Muon([{"params": hidden, "use_muon": True}, {"params": rest, "use_muon": False}], lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Job:
    """One training run, by a stage or by the oracle."""

    steps: int = 5
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32
    clip: float = 0.0
    make: Callable[[], nn.Module] = Net
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    scaler: Callable[[], LossScaler] | None = None
    config: dict[str, Any] = field(default_factory=lambda: {"reduce_bucket_size": 700})
    poison: tuple[int, int] | None = None  # (step, rank) whose loss is infinite


@dataclass
class Outcome:
    weights: dict[str, Tensor] | None
    losses: list[float]
    norms: list[float | None]
    done: list[bool]
    sent: dict[str, int]  # by collective, last step
    sent_by_tag: dict[str, int]
    events: list[Event]  # of the last step
    memory: dict[str, int]  # between the last backward and its step
    buckets: list[int]  # bytes of transient buffers then, of each step
    layout: Layout
    scales: list[float]


def train(stage_name: str, job: Job) -> Outcome:
    """Runs on every rank: micro-batch a of rank r is tokens(step, a * N + r)."""
    group = Group.world()
    torch.manual_seed(group.rank)  # ranks start apart: the stage must make them equal to rank 0
    model = job.make().to(job.dtype)
    scaler = job.scaler() if job.scaler else None
    config = ZeroConfig(gradient_clipping=job.clip, **job.config)
    stage = STAGES[stage_name](model, job.optimizer(model), group, config, scaler)  # type: ignore[call-arg]
    meter = MemoryMeter(stage.tensors)
    out = Outcome(None, [], [], [], {}, {}, [], {}, [], layout_of(stage), [])
    for step in range(job.steps):
        group.ledger.reset()
        for a in range(job.micro_batches):
            loss = model(tokens(step, a * group.size + group.rank)) / job.micro_batches
            if job.poison == (step, group.rank):
                loss = loss * float("inf")
            stage.backward(loss, sync=a == job.micro_batches - 1)
            out.losses.append(loss.item())
        out.memory = meter.now()
        out.buckets.append(out.memory["buckets"])
        out.done.append(stage.step())
        out.norms.append(stage.grad_norm)
        out.scales.append(stage.scaler.scale if stage.scaler else 1.0)
    out.sent, out.sent_by_tag = group.ledger.sent_bytes(), group.ledger.sent_bytes("tag")
    out.events = list(group.ledger.events)
    out.weights = stage.full_state_dict()
    return out


def oracle(ranks: int, job: Job, ranks_first: bool = False) -> dict[str, Tensor]:
    """One process, plain torch: all micro-batches of all ranks, summed in rank order, divided by N once.

    What no micro-batch uses has no gradient, so the optimizer leaves it alone.

    With accumulation the order of the sum is the stage's: each rank's own micro-batches first (DDP, ZeRO-1), or each
    micro-batch over ranks first (ZeRO-2, ZeRO-3). With `delayed_update` a step's gradients are applied one step late.
    Of the config nothing else matters: tests of many configs share one run.
    """
    late = bool(job.config.get("delayed_update"))
    return _oracle(ranks, job.steps, job.micro_batches, job.clip, job.make, job.optimizer, late, ranks_first)


@cache
def _oracle(
    ranks: int,
    steps: int,
    micro_batches: int,
    clip: float,
    make: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    delayed: bool,
    ranks_first: bool,
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = make()
    optimizer = make_optimizer(model)
    params = [p for p in model.parameters() if p.requires_grad]
    late: list[Tensor | None] | None = None
    for step in range(steps):
        rows = range(micro_batches)
        order = [[a * ranks + r for r in range(ranks)] for a in rows]
        if not ranks_first:
            order = [[a * ranks + r for a in rows] for r in range(ranks)]
        sums: list[list[Tensor | None]] = []
        for inner in order:
            for micro in inner:
                (model(tokens(step, micro)) / micro_batches).backward()
            # The mean over ranks is taken of each sum over ranks, so once a micro-batch when ranks come first.
            sums.append([p.grad if p.grad is None or not ranks_first else p.grad / ranks for p in params])
            optimizer.zero_grad()
        total = sums[0]
        for other in sums[1:]:
            total = [t if o is None else o if t is None else t + o for t, o in zip(total, other, strict=True)]
        if not ranks_first:
            total = [t if t is None else t / ranks for t in total]
        norm = torch.cat([t.flatten() for t in total if t is not None]).double().norm().item()
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        now = [t * factor if t is not None and factor != 1 else t for t in total]
        if delayed:
            late, now = now, late or [None] * len(params)
        apply(optimizer, params, now)
    if late is not None:
        apply(optimizer, params, late)
    return model.state_dict()


def apply(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], gradients: list[Tensor | None]) -> None:
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


def differing(a: dict[str, Tensor] | None, b: dict[str, Tensor]) -> list[str]:
    """Names of parameters that are not equal bit for bit."""
    assert a is not None
    assert a.keys() == b.keys()
    return [name for name in b if not torch.equal(a[name], b[name])]
