"""A pipeline in each of several replicas: a stage of refimpl.zero over the data axis trains each rank's layers."""

from collections.abc import Callable

import pytest
import torch
from pipeline_models import same
from torch import Tensor, nn
from worlds import run

from refimpl.comm.mesh import Mesh
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.parallel.pipeline.gpt import gpt_layers, gpt_loss
from refimpl.parallel.pipeline.module import PipelineModule
from refimpl.zero.ddp import DDP
from refimpl.zero.stage import Stage
from refimpl.zero.zero1 import Zero1

CONFIG = GPTConfig(vocab=16, context=4, width=64, layers=2, heads=2)
MICRO, STEPS = 3, 2


def model() -> GPT:
    torch.manual_seed(1)
    return GPT(CONFIG)


def batch(step: int, replica: int) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(10 * step + replica)
    ids = torch.randint(0, CONFIG.vocab, (2 * MICRO, 5))
    return list(ids[:, :-1].split(2)), list(ids[:, 1:].split(2))


def trained(kind: Callable[..., Stage], schedule: str) -> tuple[dict[str, Tensor], list[float]]:
    """This rank's weights by layer after some steps, and its replica's losses."""
    mesh = Mesh({"pipe": 2, "data": 2})
    module = PipelineModule(gpt_layers(model()), mesh.group("pipe"), gpt_loss, schedule=schedule)
    stage = kind(module, torch.optim.AdamW(module.parameters(), lr=0.01, fused=True), mesh.group("data"))
    losses: list[float] = []
    for step in range(STEPS):
        with stage.no_sync():  # the replicas' gradients meet once, in `step`
            losses += module.forward_backward(*batch(step, mesh.coordinates["data"])).tolist()
        stage.step()
    return {name: p.detach().clone() for name, p in module.named_parameters()}, losses


def one_process() -> tuple[dict[str, Tensor], list[list[float]]]:
    """The head with a copy of the embedding, so that each use adds its own; the replicas' sums are halved."""
    whole = model()
    whole.head.weight = nn.Parameter(whole.wte.weight.detach().clone())
    layers = nn.Sequential(*gpt_layers(whole))
    copies = [whole.wte.weight, whole.head.weight]
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01, fused=True)
    losses: list[list[float]] = [[], []]
    for step in range(STEPS):
        grads = []
        for replica in range(2):
            for x, y in zip(*batch(step, replica), strict=True):
                loss = gpt_loss(layers(x), y)
                (loss / MICRO).backward()
                losses[replica].append(loss.item())
            both = copies[0].grad + copies[1].grad
            copies[0].grad = copies[1].grad = both
            grads.append([p.grad for p in layers.parameters()])
            optimizer.zero_grad()
        for p, a, b in zip(layers.parameters(), *grads, strict=True):
            p.grad = (a + b) / 2
        optimizer.step()
        optimizer.zero_grad()
    return dict(layers.named_parameters()), losses


@pytest.mark.parametrize(("kind", "schedule"), [(DDP, "1f1b"), (Zero1, "1f1b"), (Zero1, "zb-h1")])
def test_replicas_of_a_pipeline_are_one_process(kind: Callable[..., Stage], schedule: str) -> None:
    expected, losses = one_process()
    results = run(trained, kind, schedule, ranks=4)
    for rank, (weights, found) in enumerate(results):
        assert found == losses[rank % 2]
        assert same(weights, {name: expected[name].detach() for name in weights}) == {}
    assert set().union(*(weights for weights, _ in results)) == expected.keys()
