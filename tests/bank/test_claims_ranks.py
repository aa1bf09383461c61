"""What cards claim and no other test shows: several ranks, refimpl's collectives and bytes."""

from functools import reduce
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from worlds import run

from refimpl.comm.group import Group
from refimpl.comm.mesh import Mesh
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero3 import Zero3


def accumulated(gradients: torch.Tensor) -> torch.Tensor:
    """gradients [4, n], one a micro-batch: this rank's are added, then reduced over the ranks."""
    group = Group.world()
    total = reduce(torch.add, gradients.chunk(group.size)[group.rank].unbind()).clone()
    group.all_reduce(total)
    return total


def test_the_number_of_ranks_is_visible_in_the_bits() -> None:
    """Repeated on as many ranks it is the same sum; on others the same micro-batches are grouped in another way."""
    torch.manual_seed(0)
    gradients = torch.randn(4, 1000)
    g1, g2, g3, g4 = gradients
    on_four, again, on_two = (run(accumulated, gradients, ranks=ranks) for ranks in (4, 4, 2))
    assert all(torch.equal(found, ((g1 + g2) + g3) + g4) for found in [*on_four, *again])
    assert all(torch.equal(found, (g1 + g2) + (g3 + g4)) for found in on_two)
    assert not torch.equal(on_four[0], on_two[0])


def two_levels(size: int) -> tuple[torch.Tensor, int, int]:
    """All-reduce on 2 nodes of 2 ranks: inside, across, inside. -> result, bytes sent inside, across."""
    mesh = Mesh({"node": 2, "local": 2})
    inside, across = mesh.group("local"), mesh.group("node")
    buffer = torch.arange(float(size)) + 100 * mesh.world.rank
    shard, result = torch.empty(size // 2), torch.empty(size)
    inside.reduce_scatter(shard, buffer, tag="inside")
    across.all_reduce(shard, tag="across")
    inside.all_gather(result, shard, tag="inside")
    sent = mesh.ledger.sent_bytes("tag")
    return result, sent["inside"], sent["across"]


def test_two_levels_send_an_inner_share_across() -> None:
    size = 64
    for result, inside, across in run(two_levels, size, ranks=4):
        assert torch.equal(result, 4 * torch.arange(float(size)) + 600)
        n = 4 * size
        assert inside == 2 * n * (2 - 1) // 2
        assert across == 2 * (n // 2) * (2 - 1) // 2, "half of the buffer, over a ring of nodes"


def pooled(channels: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Batch statistics over all ranks, from each rank's mean, variance and count."""
    group = Group.world()
    x = torch.randn(6 + group.rank, channels, generator=torch.Generator().manual_seed(group.rank))
    mine = torch.cat([x.mean(0), x.var(0, unbiased=False), torch.tensor([float(len(x))])])
    everyone = torch.empty(group.size * len(mine))
    before = sum(group.ledger.sent_bytes("tag").values())
    group.all_gather(everyone, mine)
    sent = sum(group.ledger.sent_bytes("tag").values()) - before
    rows = everyone.view(group.size, -1)
    means, variances, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    mean = (means * counts).sum(0) / counts.sum()
    variance = ((variances + means.square()) * counts).sum(0) / counts.sum() - mean.square()
    return mean, variance, sent


@pytest.mark.parametrize("ranks", [2, 3])
def test_statistics_of_all_ranks_from_two_numbers_a_channel(ranks: int) -> None:
    channels = 5
    parts = [torch.randn(6 + r, channels, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    whole = torch.cat(parts)
    for mean, variance, sent in run(pooled, channels, ranks=ranks):
        assert torch.allclose(mean, whole.mean(0), atol=1e-6)
        assert torch.allclose(variance, whole.var(0, unbiased=False), atol=1e-6)
        assert sent == (2 * channels + 1) * 4 * (ranks - 1)
    averaged = torch.stack([p.var(0, unbiased=False) for p in parts]).mean(0)
    assert not torch.allclose(averaged, whole.var(0, unbiased=False), rtol=0.01), "a mean of variances is not it"


def generate(tokens: int) -> tuple[int, int]:
    """Bytes of parameters that a rank sends for so many forwards without gradients; elements of the model."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    stage = Zero3(model, torch.optim.SGD(model.parameters(), lr=0.1))
    stage.group.ledger.reset()
    with torch.no_grad():
        for _ in range(tokens):
            model(torch.ones(1, 64))
    return stage.group.ledger.sent_bytes("tag").get("parameters", 0), 2 * 64 * 64


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_generated_token_gathers_the_model_again(ranks: int) -> None:
    for tokens in (1, 3):
        for sent, elements in run(generate, tokens, ranks=ranks):
            assert sent == tokens * 4 * elements * (ranks - 1) // ranks


class Blocks(nn.Module):
    def __init__(self, recompute: bool | None) -> None:
        """`recompute`: checkpoint each block, re-entrant or not; None for no checkpointing."""
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return x


def gathered(recompute: bool | None) -> int:
    """Bytes of parameters that a rank sends in the second step."""
    model = Blocks(recompute)
    stage = Zero3(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        stage.group.ledger.reset()
        stage.backward(model(torch.ones(1, 64, requires_grad=True)).sum())
        stage.step()
    return stage.group.ledger.sent_bytes("tag")["parameters"]


@pytest.mark.parametrize("recompute", [None, False, True])
def test_recomputation_gathers_no_third_time(recompute: bool | None) -> None:
    elements = 3 * 64 * 64
    assert run(gathered, recompute, ranks=2) == [2 * 4 * elements // 2] * 2


def saved() -> tuple[int, int]:
    """Bytes of weights and of this rank's part of a checkpoint of 4096 bf16 parameters under ZeRO-1 with AdamW."""
    model = nn.Linear(64, 64, bias=False).bfloat16()
    stage = Zero1(model, torch.optim.AdamW(model.parameters()))
    stage.backward(model(torch.ones(1, 64, dtype=torch.bfloat16)).float().sum())
    stage.step()
    found: list[torch.Tensor] = []
    waiting: list[Any] = [stage.state_dict()]
    while waiting:
        part = waiting.pop()
        if isinstance(part, torch.Tensor) and part.numel() > 1:
            found.append(part)
        elif isinstance(part, dict | list | tuple):
            waiting += part.values() if isinstance(part, dict) else part
    return model.weight.nbytes, sum(t.nbytes for t in found)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_checkpoint_has_14_bytes_a_parameter(ranks: int) -> None:
    parts = run(saved, ranks=ranks)
    assert parts[0][0] == 2 * 4096
    assert [mine for _, mine in parts] == [12 * 4096 // ranks] * ranks


def with_a_frozen_base() -> tuple[dict[str, int], dict[str, int], list[int], int]:
    """Bytes kept by class and collectives of a backward; elements frozen and trained; ranks."""
    model = nn.Sequential(*(nn.Linear(192, 192, bias=False) for _ in range(4))).bfloat16()
    model[1:].requires_grad_(False)
    sizes = [sum(p.numel() for p in model.parameters() if p.requires_grad == trained) for trained in (False, True)]
    stage = Zero3(model, torch.optim.AdamW(model.parameters()), group := Group.world())
    x = torch.ones(2, 192, dtype=torch.bfloat16)
    stage.backward(model(x).float().sum())
    stage.step()  # AdamW makes its state
    group.ledger.reset()
    stage.backward(model(x).float().sum())
    kept = {name: sum(t.nbytes for t in tensors) for name, tensors in stage.tensors().items()}
    return kept, group.ledger.calls(), sizes, group.size


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_frozen_base_costs_its_own_bytes_and_two_gathers(ranks: int) -> None:
    for kept, calls, (frozen, trained), n in run(with_a_frozen_base, ranks=ranks):
        assert kept["parameters"] == 2 * (frozen + trained) // n
        assert kept["gradients"] == 2 * trained // n
        assert kept["optimizer"] == 8 * trained // n + 4, "and a count of steps"
        assert kept["master weights"] == 4 * trained // n
        assert calls == {"all_gather": 2 * 4, "reduce_scatter": 1}
