"""Mixtures of experts in the stages of a pipeline: each stage adds their load-balance losses to what goes backward."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worlds import run

from refimpl.comm.group import Group
from refimpl.model.experts import Experts
from refimpl.model.gates import Gate, Routing
from refimpl.model.moe import MoE, WithRouting, layers
from refimpl.parallel.pipeline.module import PipelineModule

WIDTH, MICRO, BALANCE, Z = 6, 4, 0.7, 0.3
Answer = tuple[dict[str, Tensor | None], list[float], list[float]]


class Mixed(nn.Module):
    """x plus a mixture of three experts, of which a token takes two."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(Gate(WIDTH, 3, Routing(k=2)), Experts([nn.Linear(WIDTH, WIDTH) for _ in range(3)]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)


class Mse(nn.Module):
    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out, target)


def chain() -> list[nn.Module]:
    """Twelve layers: mixtures in the first and the last stage, two in one, and stages that have none."""
    torch.manual_seed(3)
    kinds = [Mixed, nn.Tanh, Mixed, Mixed, *[nn.Tanh] * 6, Mixed, nn.Tanh]
    return [kind() for kind in kinds]


def data() -> tuple[list[Tensor], list[Tensor]]:
    """Micro-batches of different values: a stage that has gone on to the next one must not balance it twice."""
    torch.manual_seed(4)
    return list(torch.randn(MICRO, 5, WIDTH)), list(torch.randn(MICRO, 5, WIDTH))


def loss_of(modules: list[nn.Module], z: float = Z) -> WithRouting:
    return WithRouting(Mse(), [m for module in modules for m in layers(module)], BALANCE, z)


def in_stages(schedule: str, interval: int = 0) -> Answer:
    """Gradients of this rank's layers, losses of training and of evaluation."""
    whole = chain()
    module = PipelineModule(
        whole, Group.world(), loss_of(whole), schedule=schedule, partition=[1.0] * 12, checkpoint_interval=interval
    )
    losses = module.forward_backward(*data()).tolist()
    for micro, out in module.pipeline(MICRO).evaluate(data()[0]).items():
        assert torch.equal(out, nn.Sequential(*chain())(data()[0][micro])), "what is no loss gets no balance"
    module.eval()
    return {n: p.grad for n, p in module.named_parameters()}, losses, module.evaluate(*data()).tolist()


def one_process() -> Answer:
    model = nn.Sequential(*chain())
    loss, found, alone = loss_of(list(model)), [], []
    for x, y in zip(*data(), strict=True):
        found.append(loss(model(x), y))
        (found[-1] / MICRO).backward()
        alone.append(F.mse_loss(model(x), y).item())
    return {n: p.grad for n, p in model.named_parameters()}, [x.item() for x in found], alone


@pytest.mark.parametrize(
    ("ranks", "schedule", "interval"),
    [
        (1, "1f1b", 0), (2, "1f1b", 0), (3, "1f1b", 0), (4, "gpipe", 0), (2, "interleaved", 0), (3, "interleaved", 2),
        (2, "zb-h1", 0), (3, "zb-h1", 1), (2, "zb-v", 0), (2, "1f1b", 1),
    ],
)  # fmt: skip
def test_gradients_and_losses_are_those_of_one_process(ranks: int, schedule: str, interval: int) -> None:
    """interval: layers that are computed again in backward, as one."""
    grads, losses, alone = one_process()
    seen: set[str] = set()
    for mine, reported, evaluated in run(in_stages, schedule, interval, ranks=ranks):
        assert all(torch.equal(g, grads[name]) for name, g in mine.items()), schedule  # type: ignore[arg-type]
        torch.testing.assert_close(reported, losses)
        torch.testing.assert_close(evaluated, alone)
        seen |= mine.keys()
    assert seen == grads.keys()


def test_two_paths_add_their_own() -> None:
    """DualPipe: each rank has a stage of either direction, and sums the copies' gradients."""
    grads, losses, _ = one_process()
    for mine, reported, _ in run(in_stages, "dualpipe", ranks=2):
        for name, g in mine.items():
            torch.testing.assert_close(g, grads[name])
        torch.testing.assert_close(reported, losses)


def test_without_the_balance_the_gates_learn_otherwise() -> None:
    grads, _, _ = one_process()
    model = nn.Sequential(*chain())
    for x, y in zip(*data(), strict=True):
        (F.mse_loss(model(x), y) / MICRO).backward()
    gates = [n for n, _ in model.named_parameters() if "gate" in n]
    assert len(gates) == 4
    assert not any(torch.equal(model.get_parameter(n).grad, grads[n]) for n in gates)  # type: ignore[arg-type]


def in_half_precision(scale: float) -> dict[str, Any]:
    module = PipelineModule([layer.bfloat16() for layer in chain()], Group.world(), loss_of([]), partition=[1.0] * 12)
    inputs, targets = data()
    module.forward_backward([x.bfloat16() for x in inputs], [y.bfloat16() for y in targets], scale)
    return {n: p.grad for n, p in module.named_parameters()}


def test_the_balance_is_scaled_as_the_loss_is() -> None:
    """A loss scale of 8, a power of 2: all gradients eightfold, in bf16 too."""
    for small, large in zip(run(in_half_precision, 1.0, ranks=3), run(in_half_precision, 8.0, ranks=3), strict=True):
        assert all(torch.equal(8 * small[name], large[name]) for name in small)
