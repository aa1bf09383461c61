"""What is split over ranks, on a device that is not the CPU: the same losses as there, and nothing mixes the two."""

from typing import Any

import pytest
import torch
import worlds
from torch import Tensor, nn

import refimpl
from refimpl import launch
from refimpl.bench.moe import Size, contestants
from refimpl.comm.group import Group
from refimpl.compress.exchange import Scattered, Served
from refimpl.compress.sign import Sign
from refimpl.engine.pipeline import PipelineEngine
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.model.moe import mixtures
from refimpl.parallel.autotp import autotp

pytestmark = pytest.mark.xdist_group("pretend")  # so that it is built once


def losses(experts: int, asked: dict[str, Any]) -> list[float]:
    """Of three steps of a GPT that initialize gets at the host, its head tied to its embedding."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=31, context=8, width=16, layers=2, heads=2))
    if experts:
        mixtures(model, experts)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    engine = refimpl.initialize(model=model, config=config | asked)[0]
    draw = torch.Generator().manual_seed(engine.group.rank)
    found: list[float] = []
    for _ in range(3):
        tokens = [torch.randint(31, (2, 9), generator=draw).to(engine.device) for _ in range(2)]
        batches = [(x[:, :-1], x[:, 1:]) for x in tokens]
        if isinstance(engine, PipelineEngine):
            found.append(engine.train_batch(iter(batches)).item())
            continue
        for batch in batches:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
    assert {p.device.type for p in engine.module.parameters()} == {engine.device.type}
    return found


PIPELINE, TENSOR = {"pipeline": {"stages": 2}}, {"tensor_parallel": {"autotp_size": 2}}
CONTEXT, EXPERTS = {"sequence_parallel_size": 2}, {"expert_parallel": {"enabled": True, "autoep_size": 2}}


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


def alike(there: list[list[float]], here: list[list[float]]) -> None:
    """Attention is another kernel there, which rounds otherwise."""
    torch.testing.assert_close(torch.tensor(there), torch.tensor(here), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("experts", "asked"),
    [(0, PIPELINE | zero(1)), (0, TENSOR | zero(1)), (0, CONTEXT | zero(2)), (4, EXPERTS | zero(2))],
)
def test_two_ranks(experts: int, asked: dict[str, Any], ranks: launch.World) -> None:
    alike(ranks.call(losses, experts, asked), worlds.run(losses, experts, asked, ranks=2))


@pytest.mark.parametrize(
    ("experts", "asked"),
    [(0, PIPELINE | TENSOR), (0, PIPELINE | zero(1)), (4, PIPELINE | EXPERTS), (4, TENSOR | EXPERTS)],
)
def test_four_ranks(experts: int, asked: dict[str, Any], four: launch.World) -> None:
    alike(four.call(losses, experts, asked), worlds.run(losses, experts, asked, ranks=4))


class Unknown(nn.Module):
    """Two of its tensors lie where the default device says."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(12, 8), nn.Embedding(6, 8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1])) + torch.zeros(8)
        x = x + self.down(torch.relu(self.up(x)))
        found: Tensor = self.head(x)
        return found


def cut(default: str | None) -> tuple[str, list[Tensor]]:
    torch.set_default_device(default)
    torch.manual_seed(0)
    group = Group.world()
    model = Unknown().to(group.device)
    ids = torch.arange(12, device=group.device).view(2, 6)
    report = autotp(model, group, ids)
    model(ids).square().mean().backward()
    return str(report), [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def test_a_model_never_seen_before_is_rehearsed_at_the_host(ranks: launch.World) -> None:
    """Whose sums go over NCCL, and whose tensors of no device are not the default one's."""
    for (here, grads), (there, others) in zip(worlds.run(cut, None), ranks.call(cut, "pretend"), strict=True):
        assert "columns" in here
        assert here == there
        assert all(map(torch.equal, grads, others))


def compressed(way: type[Scattered]) -> Tensor:
    """The first rank's chunk of the mean is empty."""
    group = Group.world()
    exchange = way(group, Sign(), 5, chunks=[0, 5])
    out = torch.empty(exchange.out_numel(), device=group.device)
    exchange.mean(torch.arange(5.0, device=group.device) - group.rank, out, "mean").wait()
    return out.cpu()


@pytest.mark.parametrize("way", [Scattered, Served])
def test_a_chunk_without_numbers_is_a_message_of_the_device_too(way: type[Scattered], ranks: launch.World) -> None:
    for here, there in zip(worlds.run(compressed, way, ranks=2), ranks.call(compressed, way), strict=True):
        assert torch.equal(here, there)


def of_mixtures() -> list[float]:
    """Of every contestant of `refimpl bench moe`, each rank alone: their gradients are compared there."""
    alone = Group(None, device=Group.world().device)
    layers = contestants(Size(11, 6, 5, 4, 2), alone)
    assert {p.device.type for layer in layers.values() for p in layer.parameters()} == {alone.device.type}
    return [float(layer()) for layer in layers.values()]


def test_the_mixtures_of_the_bench_are_where_their_rank_computes(ranks: launch.World) -> None:
    alike(ranks.call(of_mixtures), worlds.run(of_mixtures, ranks=2))
