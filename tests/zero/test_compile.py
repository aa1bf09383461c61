"""torch.compile before or after the stage is built: hooks break the graph, and the numbers stay the eager ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import refimpl
from refimpl.launch import run
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.zero.zero3 import Zero3


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cell(x)[0])
        return out


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(vocab=64, context=16, width=64, layers=2, heads=2))

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.gpt(tokens, tokens.roll(-1, 1))
        return loss


class Looking(nn.Linear):
    """Its forward asks its parameters for what a stage has put a getter in front of."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.weight.data.std()
        return y * 2 if self.weight.requires_grad and self.weight.grad is None else y


def convolution() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3)]
    return nn.Sequential(*layers), torch.randn(2, 3, 8, 8)


def attention() -> tuple[nn.Module, Tensor]:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(2, 4, 8)


MODELS: list[Callable[[], tuple[nn.Module, Tensor]]] = [
    convolution, lambda: (Recurrent(), torch.randn(2, 4, 5)), attention,
    lambda: (Language(), torch.randint(64, (2, 16))), lambda: (Looking(4, 3), torch.randn(2, 4)),
]  # fmt: skip


def losses() -> list[list[list[float]]]:
    """Of each model: eager, compiled before the stage is built, compiled after."""
    return [[two_steps(make, when) for when in ("never", "before", "after")] for make in MODELS]


def two_steps(make: Callable[[], tuple[nn.Module, Tensor]], when: str) -> list[float]:
    torch.manual_seed(0)
    model, x = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled: Any = torch.compile(model, backend="eager") if when == "before" else model
    Zero3(compiled, optimizer)
    if when == "after":
        compiled = torch.compile(model, backend="eager")
    found = []
    for _ in range(2):
        loss = compiled(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_compiled_model_gives_the_eager_losses_under_zero3() -> None:
    """A CNN, an LSTM, attention, the GPT, and a layer that looks at its parameters, traced by Dynamo."""
    for eager, before, after in run(losses, ranks=2, timeout=300)[0]:
        assert before == pytest.approx(eager, rel=1e-6)
        assert after == pytest.approx(eager, rel=1e-6)


def in_place(stage: int) -> list[list[float]]:
    """The losses of a model of many modules by `engine.compile`, and eager. RuntimeError if any is compiled 8 times."""
    found = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())))
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
        config = {"train_batch_size": 4, "optimizer": optimizer, "zero_optimization": zero}
        engine = refimpl.initialize(model=model, config=config)[0]
        if compiled:
            engine.compile(backend="eager")
        assert engine.is_compiled is compiled
        found.append([])
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for _ in range(3):
                loss = engine(torch.ones(2, 8)).square().mean()
                engine.backward(loss)
                engine.step()
                found[-1].append(loss.item())
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_hooks_of_many_modules_are_not_compiled_one_by_one(stage: int) -> None:
    compiled, eager = run(in_place, stage, ranks=2, timeout=300)[0]
    assert compiled == eager
