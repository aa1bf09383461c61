"""Jobs on ranks that stay do not see each other's settings and seeds; the cells of one session do."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from refimpl import launch
from refimpl.comm.group import Group
from refimpl.comm.mesh import Mesh


def look() -> dict[str, Any]:
    return {
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic),
        "precision": torch.get_float32_matmul_precision(),
        "anomaly": torch.is_anomaly_enabled(),
        "torch": torch.rand(2).double().tolist(),
        "random": random.random(),
        "numpy": np.random.rand(),  # noqa: NPY002 (the seed that is shared)
    }


def change() -> dict[str, Any]:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.set_float32_matmul_precision("medium")
    torch.autograd.set_detect_anomaly(True)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    return {}


def test_a_call_starts_where_the_first_did() -> None:
    with launch.World(2, device="cpu") as world:
        first = world.call(look)
        world.call(change)
        assert world.call(look) == first
        assert first[0]["gradients"] is True


def test_also_after_a_call_that_raised() -> None:
    def raises() -> None:
        change()
        raise ValueError("alike on every rank")

    with launch.World(2, device="cpu") as world:
        first = world.call(look)
        with pytest.raises(launch.RankError, match="alike on every rank"):
            world.call(raises)
        assert world.call(look) == first


def test_a_session_keeps_what_its_cells_set() -> None:
    with launch.World(1, device="cpu", keep_settings=True) as world:
        world.call(torch.manual_seed, 5)
        world.call(torch.set_default_dtype, torch.float64)
        drawn = world.call(lambda: torch.rand(3).tolist())
        assert world.call(lambda: torch.rand(3).tolist()) != drawn
        with torch.random.fork_rng():
            torch.manual_seed(5)
            assert drawn == [torch.rand(3, dtype=torch.float64).tolist()]


def groups() -> list[str]:
    """Of this process, by name."""
    return sorted(handle.group_name for handle in distributed_c10d._world.pg_map)


def names() -> int:
    return len([*distributed_c10d._world.pg_names])


def make_groups() -> list[str]:
    mesh = Mesh({"dp": 2, "tp": 2})
    mesh.group("tp").all_reduce(torch.ones(3))
    return groups()


def world_sum() -> float:
    x = torch.ones(1)
    Group.world().all_reduce(x)
    return x.item()


def one_more_for_some() -> None:
    """A group that rank 3 is not in, and does not know of."""
    if dist.get_rank() < 3:
        dist.new_group([0, 1, 2], use_local_synchronization=True)


def sum_of_pairs() -> float:
    pair = [dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1]
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x, group=dist.new_group(pair, use_local_synchronization=True))
    return x.item()


def test_ranks_that_were_in_other_numbers_of_groups_make_new_ones() -> None:
    """Their names are made of these numbers, by torch: ranks 2 and 3 would look for each other under two names."""
    with launch.World(4, device="cpu") as world:
        world.call(one_more_for_some)
        assert world.call(sum_of_pairs, timeout=20) == [1.0, 1.0, 5.0, 5.0]


@pytest.mark.parametrize("keep", [False, True])
def test_process_groups_end_with_the_job_that_made_them(keep: bool) -> None:
    with launch.World(4, device="cpu", keep_settings=keep) as world:
        first = world.call(groups)
        made = world.call(make_groups)
        assert all(len(after) > len(before) for before, after in zip(first, made, strict=True))
        assert world.call(groups) == (made if keep else first)
        assert world.call(make_groups)
        assert world.call(world_sum) == [4.0] * 4
        assert keep or world.call(names) == [1] * 4, "a call leaves nothing, or ranks that stay would grow"
