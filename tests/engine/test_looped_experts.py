"""Blocks that loop over a list of experts, as models were published, dealt out by the JSON, trained in every stage."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worlds import run

from refimpl.engine.initialize import initialize

WIDTH, EXPERTS, BATCH = 8, 6, 12


class Expert(nn.Module):
    """Mixtral's."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """Calls no expert that has no tokens; beside them a shared one, of which each token takes a learned share."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.shared, self.shared_gate = Expert(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        logits = self.gate(flat)
        weights, chosen = logits.softmax(1).topk(2, 1)
        out = self.shared(flat) * self.shared_gate(flat).sigmoid()
        for i, expert in enumerate(self.experts):
            token, place = (chosen == i).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, expert(flat[token]) * weights[token, place, None])
        return out.view_as(x), logits


class Net(nn.Module):
    """Two such blocks. starved: the last expert of the first one gets no token at all."""

    def __init__(self, starved: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.a, self.b, self.last = nn.Linear(4, WIDTH), Block(), Block(), nn.Linear(WIDTH, 1)
        if starved:
            self.a.gate.weight.data[-1] = 0
            self.a.gate.weight.data[:-1].abs_()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).abs()
        h = h + self.a(h)[0]
        out, logits = self.b(h)
        loss: Tensor = self.last(h + out).square().mean() + 0.1 * logits.logsumexp(1).square().mean()
        return loss


def settings(ep: int, stage: int, **more: Any) -> dict[str, Any]:
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    dealt = {"expert_parallel": {"enabled": True, "autoep_size": ep}} if ep > 1 else {}
    return {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        **dealt,
        **more,
    }


def trained(
    ep: int, stage: int, starved: bool, folder: Path | None, first: int = 0, more: dict[str, Any] | None = None
) -> tuple[list[float], list[float]]:
    """Losses of this rank and gradient norms of two steps, which go on from the folder's checkpoint if first > 0."""
    engine, *_ = initialize(model=Net(starved), config=settings(ep, stage, **(more or {})))
    if first:
        engine.load_checkpoint(folder)
    losses, norms = [], []
    for step in range(first, first + 2):
        x = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))
        loss = engine(x.chunk(engine.axes.feeds)[engine.axes.feed].to(next(engine.module.parameters()).dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.stage.grad_norm)
    if folder is not None and not first:
        engine.save_checkpoint(folder)
        engine.save_16bit_model(folder, "whole.bin")
    return losses, norms


@pytest.mark.parametrize("starved", [False, True])
@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (3, 3), (4, 2)])
def test_every_stage_trains_as_one_process(ranks: int, ep: int, starved: bool, tmp_path: Path) -> None:
    """Norms of all gradients, and the weights that are saved, by the names they have in the whole model."""
    one = tmp_path / "one"
    ((_, alone),) = run(trained, 1, 0, starved, one, ranks=1)
    whole = torch.load(one / "whole.bin")
    for stage in (0, 1, 2, 3):
        folder = tmp_path / str(stage)
        for _, norms in run(trained, ep, stage, starved, folder, ranks=ranks):
            torch.testing.assert_close(norms, alone, rtol=5e-5, atol=0)
        saved = torch.load(folder / "whole.bin")
        assert saved.keys() == whole.keys()
        for name, w in whole.items():
            torch.testing.assert_close(saved[name], w, rtol=1e-3, atol=1e-4, msg=f"{name}, stage {stage}")


@pytest.mark.parametrize(("ranks", "ep", "stage"), [(1, 1, 0), (2, 2, 3), (3, 1, 1)])
def test_a_checkpoint_goes_on_at_another_ep(ranks: int, ep: int, stage: int, tmp_path: Path) -> None:
    """Three ranks that shared the experts under ZeRO-3 wrote it."""
    run(trained, 3, 3, False, tmp_path / "three", ranks=3)
    run(trained, 1, 0, False, tmp_path / "one", ranks=1)
    ((_, expected),) = run(trained, 1, 0, False, tmp_path / "one", 2, ranks=1)
    for _, norms in run(trained, ep, stage, False, tmp_path / "three", 2, ranks=ranks):
        torch.testing.assert_close(norms, expected, rtol=5e-5, atol=0)
