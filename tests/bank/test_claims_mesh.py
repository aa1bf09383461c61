"""What cards claim of meshes, on real ranks."""

import pytest
import torch
from worlds import run

from refimpl.comm.axes import expert_groups
from refimpl.comm.mesh import Mesh


def hybrid(shard: int, replicate: int, numel: int) -> tuple[bool, int, int]:
    """Whether a rank's shard is that of the mean; bytes that it sent inside its node, and across."""
    mesh = Mesh({"replicate": replicate, "shard": shard})
    inside, across = mesh.group("shard"), mesh.group("replicate")
    gradient = torch.arange(numel).float() * (mesh.world.rank + 1)
    mean = gradient.clone()
    mesh.world.all_reduce(mean, "mean")
    mine = torch.empty(numel // shard)
    inside.reduce_scatter(mine, gradient, "mean", tag="inside")
    across.all_reduce(mine, "mean", tag="across")
    sent = mesh.ledger.sent_bytes("tag")
    right = torch.allclose(mine, mean.chunk(shard)[inside.rank])
    return right, sent["inside"], sent["across"]


@pytest.mark.parametrize(("shard", "replicate"), [(2, 2), (3, 1), (1, 3)])
def test_hybrid_sharding_sends_shards_across_nodes(shard: int, replicate: int) -> None:
    numel = 24
    for right, inside, across in run(hybrid, shard, replicate, numel, ranks=shard * replicate):
        assert right
        assert inside == 4 * numel * (shard - 1) // shard
        assert across == 2 * 4 * (numel // shard) * (replicate - 1) // replicate


def folded(ep: int) -> tuple[list[int], list[int], bool]:
    """Experts dealt out over data and tensor ranks: who shares them out, who has this rank's. And over data alone?"""
    mesh = Mesh({"data": 2, "tensor": 2})
    having, same = expert_groups(mesh.world, ep)
    try:
        expert_groups(mesh.group("data"), ep)
    except ValueError:
        return having.ranks, same.ranks, False
    return having.ranks, same.ranks, True


def test_experts_over_tensor_ranks_too_may_be_more_than_data_ranks() -> None:
    for rank, (having, same, over_data) in enumerate(run(folded, 4, ranks=4)):
        assert (having, same) == ([0, 1, 2, 3], [rank])
        assert not over_data
    for rank, (having, same, over_data) in enumerate(run(folded, 2, ranks=4)):
        assert having == [rank // 2 * 2, rank // 2 * 2 + 1], "tensor neighbours"
        assert len(same) == 2 * 2 // 2
        assert over_data
