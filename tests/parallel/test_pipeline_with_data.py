"""A pipeline in each of several replicas: a stage of refimpl.zero over the data axis trains each rank's layers."""

import warnings
from collections.abc import Callable

import pytest
import torch
from pipeline_models import same
from torch import Tensor, nn
from worlds import run

from refimpl.comm.group import Group
from refimpl.comm.mesh import Mesh
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.parallel.pipeline.gpt import gpt_layers, gpt_loss
from refimpl.parallel.pipeline.module import PipelineModule
from refimpl.zero.config import ZeroConfig
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


def trained(
    kind: Callable[..., Stage], schedule: str, clip: float
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """This rank's weights by layer after some steps, its replica's losses, and the norms of all gradients."""
    mesh = Mesh({"pipe": 2, "data": 2})
    module = PipelineModule(gpt_layers(model()), mesh.group("pipe"), gpt_loss, schedule=schedule)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)
    stage = kind(module, optimizer, mesh.group("data"), ZeroConfig(gradient_clipping=clip))
    stage.spans(module.group, module.repeated)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(STEPS):
        with stage.no_sync():  # the replicas' gradients meet once, in `step`
            losses += module.forward_backward(*batch(step, mesh.coordinates["data"])).tolist()
        stage.step()
        norms.append(stage.grad_norm or 0.0)
    return {name: p.detach().clone() for name, p in module.named_parameters()}, losses, norms


def one_process(clip: float) -> tuple[dict[str, Tensor], list[list[float]], list[float]]:
    """The head with a copy of the embedding, so that each use adds its own; the replicas' sums are halved."""
    whole = model()
    whole.head.weight = nn.Parameter(whole.wte.weight.detach().clone())
    layers = nn.Sequential(*gpt_layers(whole))
    copies = [whole.wte.weight, whole.head.weight]
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01, fused=True)
    losses: list[list[float]] = [[], []]
    norms = []
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
        once = [p.grad.double() for p in layers.parameters() if p is not copies[1]]
        norms.append(torch.stack([grad.square().sum() for grad in once]).sum().sqrt().item())
        if clip:
            for p in layers.parameters():
                p.grad *= min(1.0, clip / (norms[-1] + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
    return dict(layers.named_parameters()), losses, norms


@pytest.mark.parametrize(
    ("kind", "schedule", "clip"), [(DDP, "1f1b", 0.0), (Zero1, "1f1b", 0.0), (Zero1, "zb-h1", 0.5), (DDP, "gpipe", 0.5)]
)
def test_replicas_of_a_pipeline_are_one_process(kind: Callable[..., Stage], schedule: str, clip: float) -> None:
    """Clipped by the norm of all stages, in which a weight that two of them share counts once."""
    expected, losses, norms = one_process(clip)
    assert not clip or min(norms) > clip
    results = run(trained, kind, schedule, clip, ranks=4)
    for rank, (weights, found, found_norms) in enumerate(results):
        assert found == losses[rank % 2]
        assert found_norms == pytest.approx(norms, rel=1e-6 if clip else 1e-5)
        assert found_norms == results[0][2]
        assert same(weights, {name: expected[name].detach() for name in weights}) == {}
    assert set().union(*(weights for weights, *_ in results)) == expected.keys()


def overflowed() -> tuple[bool, bool]:
    """Whether a step was done when one rank of four had an infinite gradient, and whether weights stayed."""
    mesh = Mesh({"pipe": 2, "data": 2})
    module = PipelineModule(gpt_layers(model()), mesh.group("pipe"), gpt_loss)
    stage = Zero1(module, torch.optim.AdamW(module.parameters()), mesh.group("data"))
    stage.spans(module.group, module.repeated)
    with stage.no_sync():
        module.forward_backward(*batch(0, mesh.coordinates["data"]))
    first = next(p for p in module.parameters() if p not in set(module.repeated))
    if mesh.world.rank == 3:
        first.grad = torch.full_like(first, torch.inf)
    before = [p.detach().clone() for p in module.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the skipped step
        done = stage.step()
    return done, all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_an_infinite_gradient_in_one_stage_of_one_replica_skips_the_step_of_all() -> None:
    assert run(overflowed, ranks=4) == [(False, True)] * 4


def clipped_by_hand(_: int) -> None:
    stage = Zero1(nn.Linear(2, 2))
    stage.spans(Group.world())
    stage.clip_grad_norm_(1.0)


def test_a_part_of_a_model_is_not_clipped_by_hand() -> None:
    with pytest.raises(RuntimeError, match=r"this rank's part of the model: set ZeroConfig.gradient_clipping"):
        clipped_by_hand(0)
