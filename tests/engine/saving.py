"""What the tests of checkpoints share: a small model with all that a checkpoint must hold, and steps of training."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import refimpl
from refimpl.checkpoint import export
from refimpl.checkpoint.find import given
from refimpl.checkpoint.folder import Folder
from refimpl.checkpoint.manifest import digest

SIZE = 64


class Net(nn.Module):
    """A tied weight, a buffer that training changes, a frozen layer, a number and a weight of no elements."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.into, self.out = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False)
        self.out.weight = self.into.weight
        self.norm = nn.BatchNorm1d(SIZE)
        self.frozen = nn.Linear(SIZE, SIZE).requires_grad_(False)
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.out(self.norm(self.into(x)).tanh()) * self.scale + self.nothing.sum()
        return self.frozen(x).float().square().mean()


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 64},  # weights in shards
    } | more


def start(config: dict[str, Any], seed: int = 0) -> refimpl.Engine:
    net = Net(seed)
    kind = config.get("optimizer")
    optimizer = kind(net.parameters()) if isinstance(kind, type) else None
    given = {key: value for key, value in config.items() if value is not kind} if optimizer else config
    return refimpl.initialize(model=net, optimizer=optimizer, config=given)[0]


def train(engine: refimpl.Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        seed = torch.Generator().manual_seed(100 * engine.group.rank + step)
        x = torch.randn(4, SIZE, generator=seed, dtype=torch.float32).to(engine.config.dtype)
        losses.append(engine.backward(engine(x)).item())
        engine.step()
    return losses


def weights(engine: refimpl.Engine) -> dict[str, Tensor]:
    return {name: w.clone() for name, w in (engine.stage.full_state_dict() or {}).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def in_folder(folder: Path) -> dict[str, Tensor]:
    """The whole weights of a checkpoint, in the model's dtype."""
    with Folder(*given(folder)) as opened:
        return dict(export.weights(opened, None))


def tree(folder: Path) -> dict[str, Any]:
    """Every file below `folder`, with its checksum."""
    return {str(path.relative_to(folder)): digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}
