"""What cards claim of meshes, on real ranks."""

import pytest
import torch
from worlds import run

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
