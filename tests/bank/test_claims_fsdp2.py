"""What cards claim of FSDP2's way to shard: each weight by rows, beside flat pieces and beside tensor ranks."""

import torch
from torch import Tensor, nn
from worlds import run

from refimpl.comm.group import Group


def gathered(flat: bool) -> tuple[list[bool], list[bool]]:
    """Whether each of two weights is a run of what all ranks gathered; and whether it is there once runs are sorted.

    flat: the weights end to end are cut. Else each is cut by rows, and a rank sends its parts end to end.
    """
    group = Group.world()
    weights = [torch.arange(n * 2.0).view(n, 2) + 100 * n for n in (group.size, 2 * group.size)]
    whole = torch.cat([w.flatten() for w in weights])
    mine = whole.chunk(group.size)[group.rank].clone()
    if not flat:
        mine = torch.cat([w.chunk(group.size)[group.rank].flatten() for w in weights])
    out = torch.empty_like(whole)
    group.all_gather(out, mine)
    sizes = [w.numel() for w in weights]
    runs = [bool(torch.equal(part, w.flatten())) for part, w in zip(out.split(sizes), weights, strict=True)]
    columns = out.view(group.size, -1).split([n // group.size for n in sizes], dim=1)
    copied = [bool(torch.equal(part.flatten(), w.flatten())) for part, w in zip(columns, weights, strict=True)]
    return runs, copied


def test_weights_cut_by_rows_come_out_of_a_gather_in_pieces() -> None:
    for ranks in (2, 3):
        for runs, copied in run(gathered, True, ranks=ranks):
            assert runs == [True, True]
            assert copied == [False, False], "cut flat there is nothing to sort"
        for runs, copied in run(gathered, False, ranks=ranks):
            assert runs == [False, False]
            assert copied == [True, True]


def first_rows(rows: int) -> tuple[list[int], list[str], Tensor]:
    """torch's column layer under FSDP2 on dp 2 x tp 2: (dp, tp), the placements' names, the rows that this rank has."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer: nn.Module = nn.Linear(1, rows, bias=False)
    layer.weight.data = torch.arange(float(rows)).view(rows, 1)
    layer = parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["dp"])
    weight = layer.get_parameter("weight")
    names = [type(how).__name__ for how in weight.placements]  # type: ignore[attr-defined]
    place = mesh.get_coordinate()
    assert place is not None
    return list(place), names, weight.to_local().flatten()  # type: ignore[operator]


def test_tensor_parallelism_cuts_first_and_fsdp2_cuts_what_is_left() -> None:
    rows, D, t = 16, 2, 2
    for (d, j), names, mine in run(first_rows, rows, ranks=4):
        first = j * rows // t + d * rows // (t * D)
        assert mine.tolist() == list(range(first, first + rows // (t * D)))
        assert names == ["_StridedShard", "Shard"], "left to right two Shards would cut by dp first"
