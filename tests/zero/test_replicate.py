"""HSDP: state divided over some ranks, the same again on others; the update is that of all ranks' gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import STAGES, Net, tokens
from worlds import run

from refimpl.comm.mesh import Mesh
from refimpl.zero.config import ZeroConfig

STEPS = 3


class WithMeans(Net):
    """And a buffer that training changes, and a layer that only some ranks use."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.means, self.rare = nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, ids: Tensor, rare: bool = False) -> Tensor:
        x: Tensor = self.embed(ids)
        mixed = self.rare(x) if rare else x
        extra: Tensor = self.means(mixed.flatten(0, 1)).square().sum() * 1e-3
        return super().forward(ids) + extra


def model(seed: int = 0, width: int = 13) -> WithMeans:
    torch.manual_seed(seed)
    return WithMeans(width)


def trained(
    kind: str, replicas: int, shards: int, width: int = 13
) -> tuple[dict[str, Tensor], list[float], dict[str, int]]:
    """All weights, the norms, and the bytes sent in the last step by tag, on each rank."""
    mesh = Mesh({"across": replicas, "shard": shards})
    net = model(mesh.world.rank, width)  # rank 0's are taken
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    stage = STAGES[kind](net, optimizer, mesh.group("shard"), ZeroConfig(gradient_clipping=0.05))
    stage.replicate(mesh.group("across"))
    norms = []
    for step in range(STEPS):
        mesh.ledger.reset()
        stage.backward(net(tokens(step, mesh.world.rank), rare=mesh.world.rank // shards == 1 and step == 1))
        stage.step()
        norms.append(stage.grad_norm or 0.0)
    sent = mesh.ledger.sent_bytes(by="tag")
    net(tokens(9, 0))  # begins with rank 0's buffers
    return {name: w.clone() for name, w in net.state_dict().items()}, norms, sent


def one_process(replicas: int, shards: int) -> tuple[dict[str, Tensor], list[float]]:
    """Means over each group of shards in rank order, then the mean of these means."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    norms = []
    for step in range(STEPS):
        found: list[dict[nn.Parameter, Tensor]] = []
        kept = {name: b.clone() for name, b in net.named_buffers()}
        for rank in range(replicas * shards):
            for name, b in net.named_buffers():
                b.copy_(kept[name])  # every rank begins with rank 0's
            optimizer.zero_grad()
            net(tokens(step, rank), rare=rank // shards == 1 and step == 1).backward()
            found.append({p: p.grad for p in net.parameters() if p.grad is not None})
            if rank == 0:
                after = {name: b.clone() for name, b in net.named_buffers()}
        for name, b in net.named_buffers():
            b.copy_(after[name])
        for p in net.parameters():
            if not any(p in grads for grads in found):
                p.grad = None
                continue
            each = [grads.get(p, torch.zeros_like(p)) for grads in found]
            groups = [sum(each[i + 1 : i + shards], each[i]) / shards for i in range(0, len(each), shards)]
            p.grad = sum(groups[1:], groups[0]) / replicas
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.05).item())
        optimizer.step()
    net(tokens(9, 0))
    return dict(net.state_dict()), norms


@pytest.mark.parametrize(("kind", "replicas", "shards"), [("zero3", 2, 2), ("zero2", 2, 2), ("zero1", 2, 1)])
def test_it_is_the_update_of_all_ranks(kind: str, replicas: int, shards: int) -> None:
    expected, norms = one_process(replicas, shards)
    results = run(trained, kind, replicas, shards, ranks=replicas * shards)
    for weights, found, _ in results:
        assert found == pytest.approx(norms, rel=1e-6)
        for name, w in weights.items():
            assert torch.equal(w, results[0][0][name]), f"{name} differs between ranks"
            torch.testing.assert_close(w, expected[name], rtol=1e-5, atol=1e-7)


def test_weights_travel_among_few_and_shards_of_gradients_among_the_others() -> None:
    wide: Any = run(trained, "zero3", 1, 4, 128, ranks=4)
    both: Any = run(trained, "zero3", 2, 2, 128, ranks=4)
    for (_, _, flat), (_, _, two) in zip(wide, both, strict=True):
        ratio = two["parameters"] / flat["parameters"]
        assert ratio == pytest.approx((1 / 2) / (3 / 4), rel=0.1), "(S - 1) / S of the weights, padding aside"
        assert two["gradients"] / flat["gradients"] == pytest.approx((1 / 2) / (3 / 4), rel=0.1)
        assert flat["gradients across"] == 0
        assert two["gradients across"] == pytest.approx(two["gradients"], rel=0.1), "2 (R-1)/R of 1/S: as many bytes"


def test_what_no_optimizer_has_is_taken_however_it_lies_in_memory() -> None:
    def taken() -> Tensor:
        mesh = Mesh({"across": 2, "shard": 1})
        net = nn.Linear(3, 4)
        net.loose = nn.Parameter(torch.full((3, 4), float(mesh.world.rank)).t(), requires_grad=False)
        net.register_buffer("drawn", torch.full((4, 3), mesh.world.rank), persistent=False)  # never shared again
        optimizer = torch.optim.SGD([net.weight, net.bias])
        STAGES["zero1"](net, optimizer, mesh.group("shard")).replicate(mesh.group("across"))
        return net.loose.detach() + net.drawn

    assert all(not x.any() for x in run(taken, ranks=2))


def gradients_of_one_replicas_branch(used: bool) -> list[Tensor | None]:
    """What waits for a later backward of a layer that the second replica alone used; and once it is reduced."""
    mesh = Mesh({"across": 2, "shard": 1})
    net = model()
    stage = STAGES["zero1"](net, torch.optim.SGD(net.parameters()), mesh.group("shard"))
    stage.replicate(mesh.group("across"))
    found = []
    for sync in (False, True):
        loss = net(tokens(0, mesh.world.rank), rare=used and mesh.world.rank == 1)
        stage.backward(loss, sync=sync)
        found.append(stage.full_gradient("rare.bias"))
    return found


def test_a_gradient_of_one_replica_is_the_mean_on_all() -> None:
    first, second = run(gradients_of_one_replicas_branch, True, ranks=2)
    assert all(map(torch.equal, first, second))
    assert first[0].any()
    torch.testing.assert_close(first[1], 2 * first[0])
    assert run(gradients_of_one_replicas_branch, False, ranks=2) == [[None, None]] * 2
