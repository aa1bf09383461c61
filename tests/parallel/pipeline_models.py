"""Stages for the tests of pipelines: odd sizes, values of every kind between them, and one process as oracle."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 6
Value = tuple[Tensor, Tensor, None, dict[str, Any]]  # hidden, ids, nothing, {mask without a gradient, scale}


class Plain(nn.Module):
    """tanh(W x), and one parameter frozen, one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 3)
        self.layer.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) + x


class First(Plain):
    """ids [B, T] -> a value of every kind; its second hidden tensor is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.idle = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Any:
        x = self.table(ids)
        return super().forward(x), ids, None, {"mask": (ids % 3 > 0).float(), "idle": self.idle(x), "scale": 0.5}


class Middle(Plain):
    """Uses the ids and the mask, hands on the rest."""

    def forward(self, value: Any) -> Any:
        x, ids, nothing, rest = value
        assert nothing is None
        assert not ids.requires_grad
        return super().forward(x) * rest["mask"][..., None] * rest["scale"] + ids[..., None], ids, None, rest


def build(stages: int, stage: int, kind: str) -> nn.Module:
    """One stage, of the same weights wherever it is built."""
    torch.manual_seed(100 + stage)
    if kind == "tensors":
        return Plain()
    return First() if stage == 0 else Middle()


def loss(out: Any, target: Tensor) -> Tensor:
    out = out if isinstance(out, Tensor) else out[0]
    return F.mse_loss(out.sum(-1), target)


def batches(kind: str, micro_batches: int, lengths: Sequence[int] = (3,)) -> tuple[list[Tensor], list[Tensor]]:
    """[2, T] or [2, T, WIDTH] a micro-batch, T as `lengths` say, round and round."""
    torch.manual_seed(7)
    shapes = [(2, lengths[k % len(lengths)]) for k in range(micro_batches)]
    inputs = [torch.randn(*s, WIDTH) if kind == "tensors" else torch.randint(0, 11, s) for s in shapes]
    return inputs, [torch.randn(s) for s in shapes]


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def one_process(
    stages: int, kind: str, micro_batches: int, paths: int = 1, lengths: Sequence[int] = (3,)
) -> tuple[list[dict[str, Tensor | None]], list[Tensor]]:
    """Each stage's gradients and each micro-batch's loss: accumulated, those of a path by themselves."""
    model = [build(stages, s, kind) for s in range(stages)]
    inputs, targets = batches(kind, micro_batches, lengths)
    losses: dict[int, Tensor] = {}
    total: list[dict[str, Tensor | None]] = []
    for path in range(paths):
        for k in range(path, micro_batches, paths):
            x: Any = inputs[k]
            for stage in model:
                x = stage(x)
            losses[k] = loss(x, targets[k])
            (losses[k] / micro_batches).backward()
        mine = [gradients(stage) for stage in model]
        total = [{n: add(a[n], b[n]) for n in a} for a, b in zip(total, mine, strict=True)] if total else mine
        for stage in model:
            stage.zero_grad()
    return total, [losses[k].detach() for k in range(micro_batches)]


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a + b if a is not None and b is not None else a if b is None else b


def same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> dict[str, str]:
    """What differs."""
    check: Callable[[Tensor | None, Tensor | None], bool] = lambda a, b: (  # noqa: E731
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
    )
    return {n: f"{found[n]} instead of {expected[n]}" for n in expected if not check(found[n], expected[n])}
